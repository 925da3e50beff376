package killswitch

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/wire"
)

// serve serves the switch on a real control socket.
func serve(t *testing.T, s *Switch) (path string, c *control.Client) {
	t.Helper()
	s.cfg.UID, s.cfg.GID = os.Getuid(), os.Getgid()
	path = filepath.Join(t.TempDir(), "s")
	l, err := control.Listen(path, -1)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	s.Routes(mux)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- control.Serve(ctx, l, mux, time.Second) }()
	c = control.NewClient(path)
	t.Cleanup(func() {
		c.CloseIdle()
		cancel()
		<-done
	})
	return path, c
}

func stopOver(ctx context.Context, c *control.Client, req wire.StopRequest) (events []wire.StopEvent, err error) {
	return eachOver(ctx, c, "/v1/stop", req)
}

func eachOver(ctx context.Context, c *control.Client, route string, req any) (events []wire.StopEvent, err error) {
	err = c.Each(ctx, http.MethodPost, route, req, func(raw json.RawMessage) error {
		var e wire.StopEvent
		if err := json.Unmarshal(raw, &e); err != nil {
			return err
		}
		events = append(events, e)
		return nil
	})
	return events, err
}

func TestOverTheSocket(t *testing.T) {
	g := newRig(t, "a1")
	_, c := serve(t, g.sw())
	ctx := context.Background()
	if err := c.Call(ctx, http.MethodPost, "/v1/clear", wire.Scope{Kid: "a1", Card: "card-a"}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := stopOver(ctx, c, wire.StopRequest{Scope: wire.Scope{Kid: "ghost"}}); control.Status(err) != http.StatusNotFound || !strings.Contains(err.Error(), "ghost") {
		t.Errorf("unknown kid: %v", err)
	}
	if _, err := stopOver(ctx, c, wire.StopRequest{}); control.Status(err) != http.StatusBadRequest {
		t.Errorf("no scope: %v", err)
	}
	events, err := stopOver(ctx, c, wire.StopRequest{Scope: wire.Scope{Kid: "a1"}, By: "ada", Reason: "drill"})
	if err != nil || len(events) < 5 || events[len(events)-1].Final == nil {
		t.Fatalf("%+v, %v", events, err)
	}
	rep := events[len(events)-1].Final
	if rep.State != wire.StateObserved {
		t.Errorf("%+v", rep)
	}
	err = c.Call(ctx, http.MethodPost, "/v1/clear", wire.Scope{Kid: "a1", Card: "card-a"}, nil)
	if control.Status(err) != http.StatusLocked || !strings.Contains(err.Error(), "placed by ada (drill): ada, or bob and cyd together can release it") {
		t.Errorf("clear: %v", err)
	}
	var tags []wire.Tag
	if err := c.Call(ctx, http.MethodGet, "/v1/tags", nil, &tags); err != nil || len(tags) != 1 {
		t.Errorf("tags %+v, %v", tags, err)
	}
	var st wire.KillStatus
	if err := c.Call(ctx, http.MethodGet, "/v1/status", nil, &st); err != nil || !st.Layers[wire.LayerNetwork].Armed || len(st.Tags) != 1 {
		t.Errorf("status %+v, %v", st, err)
	}
	err = c.Call(ctx, http.MethodPost, "/v1/release", wire.ReleaseRequest{Stop: rep.Stop, By: "eve"}, nil)
	if control.Status(err) != http.StatusForbidden && os.Getuid() == 0 {
		t.Errorf("release by another: %v", err)
	}
}

// TestCausesOfOutsiders: whoever calls the socket cannot say that something else pulled the switch. A tag of a lease or
// a signal takes two people to come off, and one of a person only that person: the claim would choose between them.
func TestCausesOfOutsiders(t *testing.T) {
	for claimed, want := range map[string]string{
		"": CauseOrder, CauseOrder: CauseOrder, CauseHTTP: CauseHTTP, CauseSignal: CauseOrder, CauseSentinel: CauseOrder, CauseFleet: CauseOrder,
		causeDamaged: CauseOrder, CauseLease: CauseOrder, CauseTrip: CauseOrder, "because": CauseOrder,
	} {
		g := newRig(t, "a1")
		s := g.sw()
		_, c := serve(t, s)
		events, err := stopOver(t.Context(), c, wire.StopRequest{Scope: wire.Scope{Kid: "a1"}, By: "ada", Reason: "r", Cause: claimed})
		if err != nil || len(events) == 0 || events[len(events)-1].Final == nil {
			t.Fatalf("%q: %+v, %v", claimed, events, err)
		}
		tag := s.Tags()[0]
		if got := g.recorded(audit.EventStopReceived); tag.Cause != want || placer(tag) != "ada" || len(got) != 1 || got[0].Fields["cause"] != want {
			t.Errorf("claimed %q: the tag says %q, taken off by %q; recorded %+v", claimed, tag.Cause, placer(tag), got)
		}
	}
}

// TestTimeIsCountedFromTheFirstByte sends an order slowly: its own slowness is part of the time.
func TestTimeIsCountedFromTheFirstByte(t *testing.T) {
	g := newRig(t, "a1")
	path, _ := serve(t, g.sw())
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() // a test
	send := func(s string) {
		if _, err := conn.Write([]byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	body := `{"scope":{"kid":"a1"},"by":"ada","reason":"r"}`
	send("P")
	const slow = 60 * time.Millisecond
	<-time.After(slow) // what is measured
	send("OST /v1/stop HTTP/1.0\r\nHost: x\r\nContent-Length: " + "46" + "\r\n\r\n" + body)
	if len(body) != 46 {
		t.Fatalf("the body is %d bytes long", len(body))
	}
	raw := make([]byte, 0, 4096)
	for buf := make([]byte, 4096); ; {
		n, err := conn.Read(buf)
		raw = append(raw, buf[:n]...)
		if err != nil {
			break
		}
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	var last wire.StopEvent
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil || last.Final == nil {
		t.Fatalf("%v in %q", err, raw)
	}
	// Half of it leaves the server time to notice the byte; counted from the whole request it would be next to 0.
	if f := last.Final.Layers[wire.LayerSession].Fired; f < slow/2 {
		t.Errorf("fired %v after the first byte, which came about %v earlier", f, slow)
	}
}

// TestACallerThatLeavesStopsNothing: the stop goes on when its caller hangs up.
func TestACallerThatLeavesStopsNothing(t *testing.T) {
	g := newRig(t, "a1")
	hold := make(chan struct{})
	g.kill = func(dir string) error { <-hold; return g.reallyKill(dir) }
	_, c := serve(t, g.sw())
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		stopOver(ctx, c, wire.StopRequest{Scope: wire.Scope{Kid: "a1"}}) // cut off on purpose
	}()
	waitFor(t, "the kill under way", func() bool { return g.count1("kill "+kidsDir+"/a1") > 0 })
	cancel()
	<-gone
	close(hold)
	waitFor(t, "a1 dead", func() bool { some, err := g.Populated(kidsDir + "/a1"); return !some && err == nil })
}

func TestStrangersAreRefused(t *testing.T) {
	g := newRig(t, "a1")
	s := g.sw()
	mux := http.NewServeMux()
	s.Routes(mux)
	for _, route := range []string{"POST /v1/stop", "POST /v1/release", "POST /v1/order", "GET /v1/tags", "POST /v1/clear", "GET /v1/status"} {
		method, path, _ := strings.Cut(route, " ")
		w := &answer{header: http.Header{}}
		req, err := http.NewRequest(method, path, strings.NewReader(`{}`)) // never sent
		if err != nil {
			t.Fatal(err)
		}
		mux.ServeHTTP(w, req)
		if w.status != http.StatusForbidden {
			t.Errorf("%s without a known peer: %d", route, w.status)
		}
	}
}

type answer struct {
	header http.Header
	status int
}

func (a *answer) Header() http.Header         { return a.header }
func (a *answer) Write(p []byte) (int, error) { return len(p), nil }
func (a *answer) WriteHeader(s int)           { a.status = s }
