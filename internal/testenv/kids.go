package testenv

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// callLimit bounds one call to a daemon.
const callLimit = 60 * time.Second

// Client returns a control client for one daemon; its idle connections are closed when the test ends.
func (b *Box) Client(daemon string) *control.Client {
	c := control.NewClient(b.Inst.Socket(daemon))
	b.T.Cleanup(c.CloseIdle)
	return c
}

// TrySpawn spawns a kid from a card's text. inputs maps file names to contents; the card's inputs are looked
// up there.
func (b *Box) TrySpawn(name, card string, inputs map[string][]byte) (wire.Kid, error) {
	b.T.Helper()
	dir := b.T.TempDir()
	for file, content := range inputs {
		if err := os.WriteFile(filepath.Join(dir, file), content, 0o755); err != nil { // scripts are executable
			b.T.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	var kid wire.Kid
	err := b.Client(instance.Sandboxd).Call(ctx, http.MethodPost, "/v1/kids",
		wire.SpawnRequest{Name: name, Purpose: b.T.Name(), Card: card, InputDir: dir}, &kid)
	return kid, err
}

// Spawn is TrySpawn with a made-up name; it fails the test where the kid does not come up.
func (b *Box) Spawn(card string, inputs map[string][]byte) wire.Kid {
	b.T.Helper()
	kid, err := b.TrySpawn("", card, inputs)
	if err != nil {
		b.T.Fatalf("spawning a kid: %v", err)
	}
	return kid
}

// Output is what an exec printed and how it ended.
type Output struct {
	Stdout, Stderr string
	Exit           wire.ExecExit
}

// Exec runs argv in the kid and waits until it ends.
func (b *Box) Exec(kid string, argv ...string) Output {
	b.T.Helper()
	out, err := b.TryExec(context.Background(), kid, wire.ExecRequest{Argv: argv})
	if err != nil {
		b.T.Fatalf("running %v in %s: %v", argv, kid, err)
	}
	return out
}

// Sh runs a shell line in the kid and waits until it ends.
func (b *Box) Sh(kid, line string) Output {
	b.T.Helper()
	return b.Exec(kid, "/bin/sh", "-c", line)
}

// TryExec is Exec with all of its choices; the error is a refusal or a broken stream.
func (b *Box) TryExec(ctx context.Context, kid string, req wire.ExecRequest) (Output, error) {
	b.T.Helper()
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	return b.TryLongExec(ctx, kid, req)
}

// TryLongExec is TryExec for as long as ctx lets it.
func (b *Box) TryLongExec(ctx context.Context, kid string, req wire.ExecRequest) (Output, error) {
	b.T.Helper()
	var out Output
	var stdout, stderr strings.Builder
	err := b.Client(instance.Sandboxd).Each(ctx, http.MethodPost, "/v1/kids/"+kid+"/exec", req, func(line json.RawMessage) error {
		var f wire.ExecFrame
		if err := json.Unmarshal(line, &f); err != nil {
			return err
		}
		stdout.Write(f.Stdout)
		stderr.Write(f.Stderr)
		if f.Exit != nil {
			out.Exit = *f.Exit
		}
		return nil
	})
	out.Stdout, out.Stderr = stdout.String(), stderr.String()
	return out, err
}

// Destroy destroys the kid.
func (b *Box) Destroy(kid string) {
	b.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	if err := b.Client(instance.Sandboxd).Call(ctx, http.MethodDelete, "/v1/kids/"+kid+"?reason=test", nil, nil); err != nil {
		b.T.Fatalf("destroying %s: %v", kid, err)
	}
}

// Records returns the audit records of all daemons that match accepts, in order.
func (b *Box) Records(match func(*audit.Record) bool) []audit.Record {
	b.T.Helper()
	recs, _, err := audit.Timeline(b.Inst.AuditDir(), match)
	if err != nil {
		b.T.Fatal(err)
	}
	return recs
}

// WaitRecord waits until a record matches and returns the first that does.
func (b *Box) WaitRecord(what string, match func(*audit.Record) bool) audit.Record {
	b.T.Helper()
	var found audit.Record
	b.Until(10*time.Second, "there is a record of "+what, func() error {
		recs, _, err := audit.Timeline(b.Inst.AuditDir(), match)
		if err == nil && len(recs) == 0 {
			err = os.ErrNotExist
		}
		if err == nil {
			found = recs[0]
		}
		return err
	})
	return found
}

// Stop orders a stop straight from killswitchd, unsigned and in the practice authority's name where it gives none,
// and returns its report.
func (b *Box) Stop(req wire.StopRequest) wire.StopReport {
	b.T.Helper()
	if req.By == "" {
		req.By, req.Reason = practice.Authority, b.T.Name()
	}
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	var report *wire.StopReport
	err := b.Client(instance.Killswitchd).Each(ctx, http.MethodPost, "/v1/stop", req, func(line json.RawMessage) error {
		var ev wire.StopEvent
		if err := json.Unmarshal(line, &ev); err != nil {
			return err
		}
		if ev.Final != nil {
			report = ev.Final
		}
		return nil
	})
	if err != nil {
		b.T.Fatalf("stopping: %v", err)
	}
	if report == nil {
		b.T.Fatal("the stop's stream ended without a report")
	}
	return *report
}
