package evidence

import (
	_ "embed"
	"fmt"
	"html/template"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"tagout/internal/audit"
	"tagout/internal/auditview"
	"tagout/internal/card"
	"tagout/internal/config"
	"tagout/internal/drillhistory"
	"tagout/internal/policy"
	"tagout/internal/session"
)

//go:embed worksheet.html.tmpl
var sheetText string

var sheetPage = template.Must(template.New("worksheet").Funcs(template.FuncMap{"join": strings.Join}).Parse(sheetText))

// worksheet is what an auditor asks of an agent: what it was for, where it could go, what it could write, who it was, and
// how it is stopped, each from the records and documents that the same file holds.
type worksheet struct {
	Kind     string   `json:"kind"`
	Who      string   `json:"who"`
	Version  string   `json:"tagout"`
	Instance string   `json:"instance,omitempty"`
	Kids     []string `json:"kids,omitempty"`
	Sessions []string `json:"sessions,omitempty"`
	From     string   `json:"from,omitempty"` // UTC
	To       string   `json:"to,omitempty"`
	Records  int      `json:"records"`
	Gaps     uint64   `json:"records_missing_from_the_logs"`
	Missing  []string `json:"missing,omitempty"`

	Cards       []cardView          `json:"cards,omitempty"`
	Purposes    []string            `json:"purposes,omitempty"`
	Alerts      []string            `json:"alerts"`
	Network     network             `json:"network"`
	Files       map[string]uint64   `json:"file_events,omitempty"`
	Secrets     []secretView        `json:"secrets,omitempty"`
	Stops       []stopView          `json:"stops,omitempty"`
	Authorities []person            `json:"authorities,omitempty"`
	Drill       *drillhistory.Entry `json:"drill,omitempty"`
	Logs        []logView           `json:"logs,omitempty"`
}

type logView struct {
	Daemon  string `json:"daemon"`
	Records int    `json:"records"`
	Covers  uint64 `json:"checkpoint_covers"`
	Root    string `json:"root"` // base64
	Key     string `json:"key"`
}

type cardView struct {
	Name      string      `json:"name"`
	SHA256    string      `json:"sha256"`
	Task      string      `json:"task"`
	Owner     string      `json:"owner"`
	Image     string      `json:"image"`
	Network   string      `json:"network"`
	Allow     []allowView `json:"allow"`
	Deny      []string    `json:"deny,omitempty"`
	Inputs    []string    `json:"inputs,omitempty"`
	Writable  []string    `json:"writable"`
	Identity  []string    `json:"identity,omitempty"`
	Limits    []string    `json:"limits"`
	Authority string      `json:"stop_authority"`
	MaxStop   string      `json:"stop_within"`
	Trip      []string    `json:"trip,omitempty"`
}

type allowView struct {
	Host       string `json:"host"`
	Ports      string `json:"ports"`
	Protocol   string `json:"protocol"`
	Only       string `json:"only,omitempty"`
	Credential string `json:"credential,omitempty"`
}

type network struct {
	Allowed uint64   `json:"allowed"`
	Denied  uint64   `json:"denied"`
	Up      int64    `json:"bytes_up"`
	Down    int64    `json:"bytes_down"`
	Refused []string `json:"refused,omitempty"` // the most frequent
}

type secretView struct {
	Name    string `json:"name"`
	Minted  uint64 `json:"minted"`
	Used    uint64 `json:"used"`
	Refused uint64 `json:"refused"`
	Revoked uint64 `json:"revoked"`
}

type stopView struct {
	ID       string `json:"stop"`
	By       string `json:"by"`
	Why      string `json:"why"`
	Ordered  string `json:"ordered"`
	State    string `json:"state"`
	Vouched  string `json:"vouched"`
	Released string `json:"released,omitempty"`
}

type person struct {
	Name  string   `json:"name"`
	Roles []string `json:"roles"`
	Key   string   `json:"key,omitempty"`
}

// fill takes from the records what they say.
func (w *worksheet) fill(s *auditview.Story) {
	w.Kind, w.Who, w.Kids, w.Sessions, w.Records = s.Kind, auditview.OneLine(s.Who), s.Kids, s.Sessions, len(s.Lines)
	from, to := s.Span()
	w.From, w.To = from.UTC().Format(time.RFC3339Nano), to.UTC().Format(time.RFC3339Nano)
	refused, secrets, stops := map[string]uint64{}, map[string]*secretView{}, map[string]*stopView{}
	w.Files = map[string]uint64{}
	for i := range s.Lines {
		l := &s.Lines[i]
		n := max(l.Count, 1)
		if w.Instance == "" {
			w.Instance = l.Instance
		}
		switch auditview.Topic(l.Event) {
		case auditview.Network:
			w.Network.add(l, n, refused)
		case auditview.Files:
			w.Files[auditview.OneLine(l.Event)] += n
		case auditview.Identity:
			addSecret(secrets, l, n)
		}
		if l.Event == audit.EventGap && l.Fields[audit.FieldCounted] == "" {
			w.Gaps += n
		}
		if l.Event == audit.EventKidSpawned && l.Detail != "" {
			w.Purposes = append(w.Purposes, auditview.OneLine(l.Detail))
		}
		if id := l.Fields["stop"]; id != "" {
			addStop(stops, id, l)
		}
	}
	for _, id := range s.Stops {
		if v := stops[id]; v != nil {
			w.Stops = append(w.Stops, *v)
		}
	}
	for _, v := range secrets {
		w.Secrets = append(w.Secrets, *v)
	}
	slices.SortFunc(w.Secrets, func(a, b secretView) int { return strings.Compare(a.Name, b.Name) })
	w.Network.Refused = most(refused)
}

func (n *network) add(l *auditview.Line, count uint64, refused map[string]uint64) {
	switch l.Outcome {
	case audit.OutcomeAllow:
		n.Allowed += count
	case audit.OutcomeDeny:
		n.Denied += count
		to := auditview.Destination(&l.Record)
		if to == "" {
			to = "-"
		}
		refused[auditview.OneLine(to)+": "+l.Reason.String()] += count
	}
	if b := l.Bytes; b != nil && l.Event == audit.EventConnClosed {
		n.Up, n.Down = n.Up+b.Up, n.Down+b.Down
	}
}

func most(counts map[string]uint64) []string {
	type entry struct {
		what string
		n    uint64
	}
	var all []entry
	for k, n := range counts {
		all = append(all, entry{k, n})
	}
	slices.SortFunc(all, func(a, b entry) int {
		if a.n != b.n {
			return int(min(max(int64(b.n)-int64(a.n), -1), 1))
		}
		return strings.Compare(a.what, b.what)
	})
	var out []string
	for _, e := range all[:min(len(all), 20)] {
		out = append(out, fmt.Sprintf("%s (%d times)", e.what, e.n))
	}
	return out
}

func addSecret(secrets map[string]*secretView, l *auditview.Line, n uint64) {
	name := auditview.OneLine(l.Fields["secret"])
	if name == "" {
		return
	}
	v := secrets[name]
	if v == nil {
		v = &secretView{Name: name}
		secrets[name] = v
	}
	switch l.Event {
	case audit.EventTokenMinted:
		v.Minted += n
	case audit.EventTokenUsed:
		v.Used += n
	case audit.EventTokenRefused:
		v.Refused += n
	case audit.EventTokenRevoked:
		v.Revoked += n
	}
}

func addStop(stops map[string]*stopView, id string, l *auditview.Line) {
	v := stops[id]
	if v == nil {
		v = &stopView{ID: auditview.OneLine(id)}
		stops[id] = v
	}
	switch l.Event {
	case audit.EventStopReceived:
		v.By, v.Why, v.Ordered = auditview.OneLine(l.Actor), auditview.OneLine(l.Detail), l.Time.UTC().Format(time.RFC3339Nano)
		v.Vouched = "cause " + auditview.OneLine(l.Fields["cause"])
		if key := l.Fields["key"]; key != "" {
			v.Vouched = "signed with " + auditview.OneLine(key)
		} else if peer := l.Fields["unsigned"]; peer != "" {
			v.Vouched = "unsigned, by " + auditview.OneLine(peer)
		}
	case audit.EventStopCompleted:
		v.State = auditview.OneLine(l.Fields["state"])
	case audit.EventTagReleased:
		v.Released = auditview.OneLine(l.Actor) + ", " + l.Time.UTC().Format(time.RFC3339)
	}
}

// card adds what a card says.
func (w *worksheet) card(c *card.Card) {
	v := cardView{
		Name: c.Name, SHA256: c.Hash, Task: c.Task, Owner: c.Owner, Image: c.Image, Network: map[string]string{session.NetworkNone: "No network at all", session.NetworkHost: "The machine's own network, within the card's reach"}[c.Network], Authority: c.Stop.Authority, MaxStop: fmt.Sprintf("%g s", c.Stop.MaxTime.Seconds()),
		Limits: []string{fmt.Sprintf("%d processes", c.Limits.PIDs), size(c.Limits.Memory) + " memory", "processors: " + strconv.FormatFloat(c.Limits.CPUs, 'g', -1, 64), fmt.Sprintf("%d open files", c.Limits.OpenFiles)},
	}
	if v.Network == "" {
		v.Network = "What the allowlist names, through the proxy alone"
	}
	for _, r := range c.Egress.Allow {
		v.Allow = append(v.Allow, allowOf(r))
	}
	for _, r := range c.Egress.Deny {
		what := r.Host
		if what == "" {
			what = r.Address.String()
		}
		if r.Canary {
			what += " (canary)"
		}
		v.Deny = append(v.Deny, what)
	}
	for _, in := range c.Filesystem.Inputs {
		v.Inputs = append(v.Inputs, fmt.Sprintf("%s as %s, mode %04o", in.From, in.To, in.Mode))
	}
	exec := ""
	if c.Filesystem.NoExec {
		exec = ", nothing in it can be executed"
	}
	v.Writable = append(v.Writable, "/workspace: "+size(c.Filesystem.Workspace)+exec, "/tmp: "+size(c.Filesystem.Tmp)+exec)
	if c.Filesystem.Root > 0 {
		v.Writable = append(v.Writable, "elsewhere: "+size(c.Filesystem.Root))
	}
	for _, s := range c.Identity.Scope {
		v.Identity = append(v.Identity, fmt.Sprintf("secret %s, as a token in %s", s.Name, s.Env))
	}
	for _, t := range c.Stop.Trip {
		v.Trip = append(v.Trip, t.String())
	}
	w.Cards = append(w.Cards, v)
}

func allowOf(r policy.Rule) allowView {
	v := allowView{Host: r.Host, Protocol: string(r.Protocol), Credential: r.Credential}
	var ports, only []string
	for _, p := range r.Ports {
		ports = append(ports, strconv.Itoa(int(p)))
	}
	v.Ports = strings.Join(ports, ", ")
	if r.Inspect {
		only = append(only, "inspected")
	}
	only = append(append(only, r.Methods...), r.Paths...)
	v.Only = strings.Join(only, " ")
	return v
}

func size(n int64) string {
	for _, u := range []struct {
		n int64
		s string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.n && n%u.n == 0 {
			return fmt.Sprintf("%d %s", n/u.n, u.s)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}

// box adds what the box's configuration says. Of where alerts go it takes the host alone: a webhook's URL is often a
// secret.
func (w *worksheet) box(b *config.Box) {
	for _, s := range b.Sinks() {
		to := s.URL
		if u, err := url.Parse(s.URL); err == nil && u.Host != "" {
			to = u.Scheme + "://" + u.Host
		}
		w.Alerts = append(w.Alerts, fmt.Sprintf("%s: %s at %s", s.Name, s.Kind, to))
	}
	for _, a := range b.Authorities {
		w.Authorities = append(w.Authorities, person{a.Name, a.Roles, a.Key})
	}
}

func (w *worksheet) DrillSlowest() []string {
	var out []string
	for _, layer := range []string{"session", "network", "credential"} {
		if d, ok := w.Drill.Slowest[layer]; ok {
			out = append(out, fmt.Sprintf("%s %.1f ms", layer, float64(d.Microseconds())/1000))
		}
	}
	return out
}

// DrillDay is when the drill was.
func (w *worksheet) DrillDay() string { return w.Drill.Started.UTC().Format(time.RFC3339) }
