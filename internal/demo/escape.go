package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"time"

	"tagout/internal/audit"
	"tagout/internal/drill"
	"tagout/internal/practice"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

const (
	kidName = "demo"
	// atOnce is how long a denied way may take.
	atOnce = time.Second
	// recordsWithin bounds the wait for the records and alerts of what was denied.
	recordsWithin = 10 * time.Second
)

// Way is one way out of the kid: what it got, and what the box knows about it.
type Way struct {
	Number  int            `json:"number"`
	Name    string         `json:"name"`
	Denied  bool           `json:"denied"`
	Took    time.Duration  `json:"took_ns"` // as the kid measured it
	Got     string         `json:"got"`     // what the kid got
	Reason  reason.Code    `json:"reason"`
	Process *audit.Process `json:"process,omitempty"` // from the record
	Daemon  string         `json:"daemon,omitempty"`  // that wrote the record
	Record  string         `json:"record,omitempty"`  // its id
	Alerted bool           `json:"alerted"`
}

// ways lists the reasons that each way may be denied for.
var ways = [][]reason.Code{
	{reason.RawAddress}, {reason.PortNotAllowed}, {reason.NameNotAllowed, reason.DenyRule}, {reason.DNSBypass},
	{reason.DoT}, {reason.QUIC}, {reason.Metadata}, {reason.IPv6},
}

var wayLine = regexp.MustCompile(`^way ([0-9]+) (.+): (denied|GOT OUT) after ([0-9.]+)ms: (.*)$`)

// parseWay reads one line of the script; ok is false for its other lines.
func parseWay(line string) (w Way, ok bool) {
	m := wayLine.FindStringSubmatch(line)
	if m == nil {
		return Way{}, false
	}
	n, err := strconv.Atoi(m[1])
	ms, err2 := strconv.ParseFloat(m[4], 64)
	if err != nil || err2 != nil || n < 1 || n > len(ways) {
		return Way{}, false
	}
	return Way{Number: n, Name: m[2], Denied: m[3] == "denied", Took: time.Duration(ms * float64(time.Millisecond)), Got: m[5]}, true
}

// escape spawns the kid, runs the script and gathers what everybody saw of it.
func (s *show) escape(ctx context.Context) error {
	box := drill.Sockets(s.inst, s.net)
	began := practice.Now()
	kid, err := box.Spawn(ctx, wire.SpawnRequest{
		Name: kidName, Purpose: "the demo's untrusted script", Card: string(s.ev.practiceCard), CardFile: "practice.yaml", InputDir: s.inputs,
	})
	if err != nil {
		return fmt.Errorf("spawning kid %s: %w", kidName, err)
	}
	fmt.Fprintf(s.Out, "  kid %s spawned in %.0f ms\n", kid.Name, float64((practice.Now()-began).Microseconds())/1000)
	if err := s.runScript(ctx, box); err != nil {
		return err
	}
	if err := s.searchKid(ctx, box); err != nil {
		return err
	}
	s.ev.apiUses = s.net.API.Uses.Total()
	s.ev.tokensSeen = s.net.API.TokensSeen()
	s.gather(ctx)
	s.rep.Ways = s.ev.ways
	if err := box.Destroy(ctx, kidName, "the script has ended"); err != nil {
		return fmt.Errorf("destroying kid %s: %w", kidName, err)
	}
	return nil
}

func (s *show) runScript(ctx context.Context, box drill.Box) error {
	lines := &lineBuffer{each: func(line string) {
		fmt.Fprintf(s.Out, "  | %s\n", line)
		if w, ok := parseWay(line); ok {
			s.ev.ways = append(s.ev.ways, w)
		}
	}}
	exit, err := s.exec(ctx, box, wire.ExecRequest{
		Argv:    []string{"/bin/sh", "/workspace/escape.sh"},
		Env:     map[string]string{"EVIL": s.net.EvilAddr().String(), "EVIL6": s.net.EvilAddr6().String(), "DNS": s.net.DNSAddr().String()},
		Timeout: 30 * time.Second,
	}, lines)
	lines.flush()
	if err != nil {
		return fmt.Errorf("running the script: %w", err)
	}
	if exit.Result != "exited" {
		return fmt.Errorf("running the script: it ended with %s %s", exit.Result, exit.Detail)
	}
	return nil
}

// searchKid has the kid print all that it can know, and keeps it for the search for the secret. It is not
// shown: it is long.
func (s *show) searchKid(ctx context.Context, box drill.Box) error {
	const dump = `env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline /proc/[0-9]*/mountinfo; find /etc /tmp /run /workspace -type f ! -name hostile -exec cat {} +; :`
	_, err := s.exec(ctx, box, wire.ExecRequest{Argv: []string{"/bin/sh", "-c", dump}, Timeout: 20 * time.Second}, nil)
	if err != nil {
		return fmt.Errorf("searching the kid: %w", err)
	}
	return nil
}

// exec runs a command; all its output is kept for the search for the secret, and handed to lines.
func (s *show) exec(ctx context.Context, box drill.Box, req wire.ExecRequest, lines *lineBuffer) (wire.ExecExit, error) {
	var exit *wire.ExecExit
	err := box.Exec(ctx, kidName, req, func(f wire.ExecFrame) {
		s.ev.kidOutput = append(append(s.ev.kidOutput, f.Stdout...), f.Stderr...)
		if lines != nil {
			lines.add(f.Stdout)
			lines.add(f.Stderr)
		}
		if f.Exit != nil {
			exit = f.Exit
		}
	})
	if err == nil && exit == nil {
		err = errors.New("the output ended without saying how the command did")
	}
	if err != nil {
		return wire.ExecExit{}, err
	}
	return *exit, nil
}

// gather joins each way with its record and its alert, waiting for those that are still under way. What does
// not come is missing from the way, and judged.
func (s *show) gather(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, recordsWithin)
	defer cancel()
	practice.Wait(ctx, "everything denied is logged and alerted", func() bool { // what is missing is judged
		records, err := readAudit(s.inst)
		if err != nil {
			return false
		}
		alerts, _ := s.net.Webhook.Alerts()
		whole := len(s.ev.ways) == len(ways)
		for i := range s.ev.ways {
			s.ev.ways[i].join(records, alerts)
			whole = whole && s.ev.ways[i].Alerted
		}
		return whole
	})
	s.ev.logs = readLogs(s.inst)
}

// join finds the way's record and the alert with that record's id.
func (w *Way) join(records []audit.Record, alerts []practice.Alert) {
	for _, r := range records {
		if r.Kid != kidName || r.Outcome != audit.OutcomeDeny || !w.mayBe(r.Reason) || r.Process == nil {
			continue
		}
		w.Reason, w.Process, w.Daemon, w.Record = r.Reason, r.Process, r.Daemon, r.ID
		for _, a := range alerts {
			if a.Record.ID == r.ID && a.Record.Daemon == r.Daemon {
				w.Alerted = true
				return
			}
		}
	}
}

func (w *Way) mayBe(code reason.Code) bool {
	for _, c := range ways[w.Number-1] {
		if c == code {
			return true
		}
	}
	return false
}

// lineBuffer cuts a stream into lines.
type lineBuffer struct {
	rest []byte
	each func(string)
}

func (b *lineBuffer) add(p []byte) {
	b.rest = append(b.rest, p...)
	for {
		line, rest, ok := bytes.Cut(b.rest, []byte("\n"))
		if !ok {
			return
		}
		b.rest = rest
		b.each(string(line))
	}
}

func (b *lineBuffer) flush() {
	if len(b.rest) > 0 {
		b.each(string(b.rest))
	}
	b.rest = nil
}
