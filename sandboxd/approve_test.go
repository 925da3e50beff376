package sandboxd

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/authority"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// desk is where approvals are judged, on a machine whose clocks the test sets.
type desk struct {
	t       *testing.T
	dir     string
	private string // Grace's key
	list    authority.List
	clocks  clocks

	mu   sync.Mutex
	recs []audit.Record
}

var hostAsk = wire.SpawnRequest{Name: "k1", Purpose: "look", Card: "card"}

const deskBox = "01JD0000000000000000000001"

func newDesk(t *testing.T) *desk {
	private, public, err := authority.NewKey("Grace")
	if err != nil {
		t.Fatal(err)
	}
	return &desk{t: t, dir: t.TempDir(), private: private, clocks: clocks{wall: time.Now(), boot: time.Hour},
		list: authority.List{Box: deskBox, People: []authority.Person{{Name: "Grace", Roles: []string{authority.RoleHost}, Key: public}}}}
}

func (d *desk) List() (authority.List, error) { return d.list, nil }
func (d *desk) Err() error                    { return nil }
func (d *desk) Redact(text string) string     { return text }
func (d *desk) Log(r audit.Record) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.recs = append(d.recs, r)
}

// open is a sandboxd that starts, on what its predecessor left.
func (d *desk) open() *orders {
	d.t.Helper()
	used, err := authority.OpenUsed(filepath.Join(d.dir, "orders"), time.Now())
	if err != nil {
		d.t.Fatal(err)
	}
	return &orders{list: d, used: used, clock: d.clocks.open(d.t, filepath.Join(d.dir, "clock"), "boot1"), audit: d, log: slog.New(slog.DiscardHandler)}
}

// approval is one that Grace signs now, by the wall clock.
func (d *desk) approval() wire.SpawnRequest {
	d.t.Helper()
	raw, err := authority.Sign(authority.New(authority.Order{
		Action: authority.ActionHost, Box: deskBox, By: "Grace", Kid: hostAsk.Name, Card: authority.CardSum(hostAsk.Card), Reason: hostAsk.Purpose,
	}, d.clocks.wall, authority.HostLife), d.private)
	if err != nil {
		d.t.Fatal(err)
	}
	r := hostAsk
	r.Approval = string(raw)
	return r
}

func (d *desk) count(event string) (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.recs {
		if r.Event == event {
			n++
		}
	}
	return n
}

func codeOf(err error) reason.Code {
	var no *authority.Refusal
	if !errors.As(err, &no) {
		return reason.OK
	}
	return no.Code
}

// TestAnApprovalCountsOnce, however many ask at once, and not for the sandboxd after the one that took it, which may have
// been killed the moment that it said yes.
func TestAnApprovalCountsOnce(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	o, ask := d.open(), d.approval()
	const askers = 32
	errs := make(chan error, askers)
	var together sync.WaitGroup
	together.Add(askers)
	for range askers {
		go func() {
			together.Done()
			together.Wait()
			_, err := o.Approve(ask, "uid:0")
			errs <- err
		}()
	}
	accepted := 0
	for range askers {
		if err := <-errs; err == nil {
			accepted++
		} else if codeOf(err) != reason.OrderReplayed {
			t.Errorf("%v, want %s", err, reason.OrderReplayed)
		}
	}
	if accepted != 1 || d.count(audit.EventHostApproved) != 1 || d.count(audit.EventOrderRefused) != askers-1 {
		t.Errorf("accepted %d times; %d records say so, and %d that it was refused", accepted, d.count(audit.EventHostApproved), d.count(audit.EventOrderRefused))
	}
	if _, err := d.open().Approve(ask, "uid:0"); codeOf(err) != reason.OrderReplayed {
		t.Errorf("after a restart: %v", err)
	}
	// The control: another approval of the same is as good as the first was.
	if _, err := d.open().Approve(d.approval(), "uid:0"); err != nil {
		t.Errorf("another approval: %v", err)
	}
}

// TestAnApprovalThatCannotBeNotedIsNotTaken, nor later, when the disk is well again.
func TestAnApprovalThatCannotBeNotedIsNotTaken(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	o, ask := d.open(), d.approval()
	notes := filepath.Join(d.dir, "orders")
	if err := errors.Join(os.RemoveAll(notes), os.WriteFile(notes, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := o.Approve(ask, "uid:0"); codeOf(err) != reason.OrderNotKept {
		t.Errorf("on a broken disk: %v", err)
	}
	if err := errors.Join(os.Remove(notes), os.Mkdir(notes, 0o750)); err != nil {
		t.Fatal(err)
	}
	if _, err := o.Approve(ask, "uid:0"); codeOf(err) != reason.OrderReplayed {
		t.Errorf("on a disk that is well again: %v", err)
	}
	if n := d.count(audit.EventHostApproved); n != 0 {
		t.Errorf("%d records say that it was approved", n)
	}
	if _, err := o.Approve(d.approval(), "uid:0"); err != nil {
		t.Errorf("the control, another one: %v", err)
	}
}

// TestTwoMinutesAreTwoMinutes, whatever is done to the wall clock; the control is what that clock alone would say.
func TestTwoMinutesAreTwoMinutes(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		pass    time.Duration // after it was signed
		step    time.Duration // of the wall clock, then
		restart bool          // of sandboxd, then
		code    reason.Code
	}{
		"at once":                  {0, 0, false, reason.OK},
		"in time":                  {authority.HostLife - 2*time.Second, 0, false, reason.OK},
		"in time, over a restart":  {authority.HostLife - 2*time.Second, 0, true, reason.OK},
		"late":                     {authority.HostLife, 0, false, reason.OrderExpired},
		"late, set back":           {authority.HostLife, -authority.HostLife, false, reason.OrderExpired},
		"late, set back, restart":  {authority.HostLife, -authority.HostLife, true, reason.OrderExpired},
		"late, set back by an age": {authority.HostLife + time.Hour, -24 * time.Hour, true, reason.OrderExpired},
		"set forward":              {time.Second, authority.HostLife, false, reason.OrderExpired},
	} {
		d := newDesk(t)
		o, ask := d.open(), d.approval()
		d.clocks.pass(c.pass)
		d.clocks.wall = d.clocks.wall.Add(c.step)
		if c.restart {
			o = d.open()
		}
		if _, err := o.Approve(ask, "uid:0"); codeOf(err) != c.code {
			t.Errorf("%s: %v, want %s", name, err, c.code)
		}
		if _, err := d.list.Verify([]byte(ask.Approval), d.clocks.wall); name == "late, set back" && err != nil {
			t.Errorf("%s: the wall clock alone refuses it too: %v: the test shows nothing", name, err)
		}
	}
}
