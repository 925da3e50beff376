package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"tagout/internal/authority"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/testroot"
	"tagout/internal/wire"
	"tagout/sandboxd/kids"
)

type fakeKids struct {
	Files
	Commands // nil: panics on an unexpected call
	Lives    // nil: panics on an unexpected call
	spawn    func(ctx context.Context, r kids.Request) (wire.Kid, error)
	exec     func(ctx context.Context, name, actor string, r wire.ExecRequest, send func(wire.ExecFrame) error) error
	destroy  func(ctx context.Context, name, actor, why string) error
	get      func(ctx context.Context, name string) (wire.Kid, error)
	list     func(ctx context.Context) []wire.Kid
	change   func(name string, c kids.EgressChange) (wire.PolicyReply, error)
	grant    func(name, actor string, r wire.GrantRequest) (wire.Grant, error)
	ungrant  func(name, id, actor, by, why string) error
	refused  func(name, by string)

	use        *wire.CredentialUse
	withLesson func(ctx context.Context, name, actor, why, lesson string) (string, error)
}

func (f fakeKids) Spawn(ctx context.Context, r kids.Request) (wire.Kid, error) {
	return f.spawn(ctx, r)
}
func (f fakeKids) Exec(ctx context.Context, name, actor string, r wire.ExecRequest, send func(wire.ExecFrame) error) error {
	return f.exec(ctx, name, actor, r, send)
}
func (f fakeKids) DestroyWithLesson(ctx context.Context, name, actor, why, lesson string) (string, error) {
	return f.withLesson(ctx, name, actor, why, lesson)
}
func (f fakeKids) CredentialUse(context.Context, string) *wire.CredentialUse { return f.use }
func (f fakeKids) Destroy(ctx context.Context, name, actor, why string) error {
	return f.destroy(ctx, name, actor, why)
}
func (f fakeKids) Get(ctx context.Context, name string) (wire.Kid, error) { return f.get(ctx, name) }
func (f fakeKids) ChangePolicy(_ context.Context, name string, c kids.EgressChange) (wire.PolicyReply, error) {
	return f.change(name, c)
}
func (f fakeKids) Grant(_ context.Context, name, actor string, r wire.GrantRequest, _ kids.Signature) (wire.Grant, error) {
	return f.grant(name, actor, r)
}
func (f fakeKids) Ungrant(_ context.Context, name, id, actor, by, why string, _ kids.Signature) error {
	return f.ungrant(name, id, actor, by, why)
}
func (f fakeKids) PolicyRefused(name, _, by string, _ error) { f.refused(name, by) }
func (f fakeKids) Grants(string) ([]wire.Grant, error)       { return []wire.Grant{}, nil }
func (f fakeKids) List(ctx context.Context) []wire.Kid       { return f.list(ctx) }

// onlyAda are Orders of a box without keys.
type onlyAda struct{}

func (onlyAda) Unsigned(by, _, _ string) error {
	if by != "ada" {
		return &authority.Refusal{Code: reason.OrderRole, Text: "ada may"}
	}
	return nil
}

func (onlyAda) Spawn(wire.SpawnRequest, string) (authority.Signed, error) {
	return authority.Signed{}, nil
}

func (onlyAda) Approve(wire.SpawnRequest, string) (authority.Signed, error) {
	return authority.Signed{}, &authority.Refusal{Code: reason.OrderUnsigned, Text: "ada may"}
}

func (onlyAda) Accept([]byte, string) (authority.Signed, error) { panic("an unexpected order") }

// serve serves k on a unix socket and returns a client for it.
func serve(t *testing.T, k Kids, plan Planner) *control.Client {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	serveAt(t, path, k, plan)
	return control.NewClient(path)
}

func serveAt(t *testing.T, path string, k Kids, plan Planner) {
	t.Helper()
	testroot.Require(t) // the routes admit nobody but root
	l, err := control.Listen(path, os.Getgid())
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	Register(mux, New(Config{Kids: k, Plan: plan, PlanEgress: func(r wire.PolicyRequest) (kids.EgressChange, error) {
		if r.Card == "" {
			return kids.EgressChange{}, errors.New("card:1:1: nothing in it")
		}
		return kids.EgressChange{Card: r.Card}, nil
	}, Orders: onlyAda{}}))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- control.Serve(ctx, l, mux, time.Second) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func refusal(kind kids.Kind, code reason.Code) error {
	return &kids.Error{Kind: kind, Reason: code, Err: errors.New("because")}
}

func TestSpawnStatuses(t *testing.T) {
	for _, c := range []struct {
		err    error
		status int
		code   reason.Code
	}{
		{refusal(kids.Conflict, reason.OK), 409, reason.OK},
		{refusal(kids.Invalid, reason.Malformed), 422, reason.Malformed},
		{refusal(kids.Tagged, reason.Tagged), 423, reason.Tagged},
		{refusal(kids.Unavailable, reason.CreddDown), 503, reason.CreddDown},
		{refusal(kids.Capacity, reason.Capacity), 507, reason.Capacity},
		{fmt.Errorf("broken"), 500, reason.Internal},
	} {
		client := serve(t, fakeKids{spawn: func(context.Context, kids.Request) (wire.Kid, error) { return wire.Kid{}, c.err }},
			func(wire.SpawnRequest) (kids.Plan, error) { return kids.Plan{}, nil })
		err := client.Call(t.Context(), http.MethodPost, "/v1/kids", wire.SpawnRequest{Purpose: "test"}, nil)
		var e *control.Error
		if !errors.As(err, &e) || e.Problem.Status != c.status || e.Problem.Reason != c.code || e.Problem.Detail != c.err.Error() {
			t.Errorf("%v: %v %+v, want %d %s", c.err, err, e, c.status, c.code)
		}
	}
}

// TestAnotherMethod: a path that is served says so, whatever the method.
func TestAnotherMethod(t *testing.T) {
	client := serve(t, fakeKids{}, nil)
	for route, want := range map[string]int{"PATCH /v1/kids": 405, "POST /v1/kids/k1": 405, "GET /v1/nosuch": 404} {
		method, path, _ := strings.Cut(route, " ")
		err := client.Call(t.Context(), method, path, nil, nil)
		if control.Status(err) != want || !strings.Contains(err.Error(), "there is no route "+route) {
			t.Errorf("%s: %d %v, want %d", route, control.Status(err), err, want)
		}
	}
}

func TestBadCardIs422(t *testing.T) {
	client := serve(t, fakeKids{}, func(wire.SpawnRequest) (kids.Plan, error) { return kids.Plan{}, errors.New("card:3:1: unknown key") })
	err := client.Call(t.Context(), http.MethodPost, "/v1/kids", wire.SpawnRequest{Purpose: "test", Card: "x"}, nil)
	if control.Status(err) != 422 || err.Error() != "card:3:1: unknown key" {
		t.Errorf("bad card: %v", err)
	}
}

// A kid that nobody knows the purpose of is not made; control: TestSpawnStatuses gets through with one.
func TestASpawnNeedsAPurpose(t *testing.T) {
	client := serve(t, fakeKids{}, nil) // neither is asked
	for _, purpose := range []string{"", " \n", strings.Repeat("x", 4097)} {
		err := client.Call(t.Context(), http.MethodPost, "/v1/kids", wire.SpawnRequest{Purpose: purpose, Card: "x"}, nil)
		if control.Status(err) != http.StatusUnprocessableEntity || !strings.Contains(err.Error(), "purpose") {
			t.Errorf("a purpose of %d bytes: %v", len(purpose), err)
		}
	}
}

func TestExecStreams(t *testing.T) {
	client := serve(t, fakeKids{exec: func(_ context.Context, name, actor string, r wire.ExecRequest, send func(wire.ExecFrame) error) error {
		if name != "k1" || actor != "uid:0" || r.Argv[0] != "true" {
			return refusal(kids.NotFound, reason.UnknownSession)
		}
		return errors.Join(send(wire.ExecFrame{Stdout: []byte{0xff, 0}}), send(wire.ExecFrame{Exit: &wire.ExecExit{Result: "exited"}}))
	}}, nil)
	var frames []wire.ExecFrame
	err := client.Each(t.Context(), http.MethodPost, "/v1/kids/k1/exec", wire.ExecRequest{Argv: []string{"true"}}, func(raw json.RawMessage) error {
		var f wire.ExecFrame
		defer func() { frames = append(frames, f) }()
		return json.Unmarshal(raw, &f)
	})
	if err != nil || len(frames) != 2 || string(frames[0].Stdout) != "\xff\x00" || frames[1].Exit == nil {
		t.Errorf("frames %+v, %v", frames, err)
	}
	err = client.Each(t.Context(), http.MethodPost, "/v1/kids/k2/exec", wire.ExecRequest{Argv: []string{"true"}}, nil)
	if control.Status(err) != 404 {
		t.Errorf("unknown kid: %v, want 404", err)
	}
	err = client.Each(t.Context(), http.MethodPost, "/v1/kids/k1/exec", wire.ExecRequest{Argv: []string{"true"}, Input: true}, nil)
	if control.Status(err) != 422 {
		t.Errorf("input that nobody could send: %v, want 422", err)
	}
}

func TestDestroyPassesTheReason(t *testing.T) {
	got := ""
	client := serve(t, fakeKids{destroy: func(_ context.Context, name, actor, why string) error {
		got = name + " " + actor + " " + why
		return nil
	}}, nil)
	if err := client.Call(t.Context(), http.MethodDelete, "/v1/kids/k1?reason=all+done", nil, nil); err != nil || got != "k1 uid:0 all done" {
		t.Errorf("destroyed %q, %v", got, err)
	}
}

func TestDestroyWithALesson(t *testing.T) {
	var got []string
	client := serve(t, fakeKids{
		destroy: func(_ context.Context, name, actor, why string) error {
			got = append(got, name+" "+actor+" "+why)
			return nil
		},
		withLesson: func(_ context.Context, name, actor, why, lesson string) (string, error) {
			got = append(got, name+" "+actor+" "+why+": "+lesson)
			return "file.md", nil
		},
	}, nil)
	var done wire.DestroyReply
	for lesson, file := range map[string]string{"": "", "text": "file.md"} {
		if err := client.Call(t.Context(), http.MethodPost, "/v1/kids/k1/destroy", wire.DestroyRequest{Reason: "r", Lesson: lesson}, &done); err != nil || done.Lesson != file {
			t.Errorf("lesson %q: %+v, %v", lesson, done, err)
		}
		done = wire.DestroyReply{}
	}
	slices.Sort(got)
	if strings.Join(got, "; ") != "k1 uid:0 r; k1 uid:0 r: text" {
		t.Errorf("calls: %q", got)
	}
	long := wire.DestroyRequest{Reason: strings.Repeat("x", 5000)}
	if err := client.Call(t.Context(), http.MethodPost, "/v1/kids/k1/destroy", long, nil); control.Status(err) != http.StatusUnprocessableEntity {
		t.Errorf("a reason of 5000 bytes: %v", err)
	}
}

func TestUnknownFieldsAreRefused(t *testing.T) {
	client := serve(t, fakeKids{}, nil)
	if err := client.Call(t.Context(), http.MethodPost, "/v1/kids", map[string]string{"nmae": "x"}, nil); control.Status(err) != 422 {
		t.Errorf("unknown field: %v, want 422", err)
	}
}

// TestOnlyWhoMayOpens: a grant or a policy needs somebody with the role; an unreadable card changes nothing.
func TestOnlyWhoMayOpens(t *testing.T) {
	var calls []string
	k := fakeKids{
		change: func(name string, c kids.EgressChange) (wire.PolicyReply, error) {
			calls = append(calls, "change "+name+" "+c.Card+" "+c.By+" "+c.Actor)
			return wire.PolicyReply{Generation: 2}, nil
		},
		grant: func(name, actor string, r wire.GrantRequest) (wire.Grant, error) {
			calls = append(calls, "grant "+name+" "+r.Host+" "+actor)
			return wire.Grant{ID: "g"}, nil
		},
		ungrant: func(name, id, _, by, why string) error {
			calls = append(calls, "ungrant "+name+" "+id+" "+by+" "+why)
			return nil
		},
	}
	var refused []string
	k.refused = func(name, by string) { refused = append(refused, name+" "+by) }
	c := serve(t, k, nil)
	call := func(method, route string, in any) int {
		return control.Status(c.Call(t.Context(), method, route, in, nil))
	}
	for _, by := range []string{"", "mallory"} {
		if s := call("POST", "/v1/kids/k/grants", wire.GrantRequest{Host: "a.test", By: by}); s != http.StatusForbidden {
			t.Errorf("grant by %q: %d", by, s)
		}
		if s := call("PUT", "/v1/kids/k/policy", wire.PolicyRequest{Card: "c", By: by}); s != http.StatusForbidden {
			t.Errorf("policy by %q: %d", by, s)
		}
	}
	if s := call("PUT", "/v1/kids/k/policy", wire.PolicyRequest{By: "ada"}); s != http.StatusUnprocessableEntity {
		t.Errorf("an unreadable card: %d", s)
	}
	if len(refused) != 1 || refused[0] != "k ada" {
		t.Errorf("an unreadable card was recorded as %v", refused)
	}
	if len(calls) != 0 {
		t.Fatalf("reached: %v", calls)
	}
	for _, s := range []int{
		call("POST", "/v1/kids/k/grants", wire.GrantRequest{Host: "a.test", By: "ada"}),
		call("PUT", "/v1/kids/k/policy", wire.PolicyRequest{Card: "c", By: "ada"}),
		call("DELETE", "/v1/kids/k/grants/g?by=anybody&reason=r", nil),
	} {
		if s != 0 {
			t.Errorf("refused with %d", s)
		}
	}
	if got := strings.Join(calls, "; "); got != "grant k a.test uid:0; change k c ada uid:0; ungrant k g anybody r" {
		t.Errorf("calls: %s", got)
	}
}
