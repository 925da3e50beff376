package api

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/kids"
	"tagout/sandboxd/once"
)

// request sends a request as the caller.
func request(h http.Handler, c Caller, method, target, key, body string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, target, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	if key != "" {
		r.Header.Set(keyHeader, key)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r.WithContext(WithCaller(r.Context(), c)))
	return w
}

func keys(t *testing.T) *once.Store {
	t.Helper()
	s, err := once.Open(once.Config{Dir: t.TempDir(), Wait: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

var root = Caller{Name: "uid:0", Roles: Roles()}

// TestASpawnIsRepeated (K12): the same key is the same kid, another body is a conflict, a refusal is judged anew, and
// what was made without a key is made each time.
func TestASpawnIsRepeated(t *testing.T) {
	spawned, fail := 0, error(nil)
	api := New(Config{Keys: keys(t), Plan: func(wire.SpawnRequest) (kids.Plan, error) { return kids.Plan{}, nil },
		Kids: fakeKids{spawn: func(ctx context.Context, r kids.Request) (wire.Kid, error) {
			if fail != nil {
				return wire.Kid{}, fail
			}
			if _, bounded := ctx.Deadline(); bounded != (r.Origin != "") {
				t.Error("a spawn with a key does not outlive its caller, or one without does")
			}
			spawned++
			return wire.Kid{Name: "kid-" + r.Purpose, Mark: uint32(spawned)}, nil
		}}})
	const body = `{"purpose":"x","card":"c"}`
	fail = refusal(kids.Tagged, reason.Tagged)
	if w := request(api, root, "POST", "/v1/kids", "k", body); w.Code != http.StatusLocked {
		t.Fatalf("refused: %d", w.Code)
	}
	fail = nil
	first := request(api, root, "POST", "/v1/kids", "k", body)
	again := request(api, root, "POST", "/v1/kids", "k", body)
	if first.Code != 200 || again.Code != 200 || first.Body.String() != again.Body.String() || spawned != 1 {
		t.Errorf("%d kids: %s and %s", spawned, first.Body, again.Body)
	}
	if again.Header().Get(repeatedHeader) != "true" || first.Header().Get(repeatedHeader) != "" {
		t.Error("a repeat is not told from a first answer")
	}
	if w := request(api, root, "POST", "/v1/kids", "k", `{"purpose":"y","card":"c"}`); w.Code != http.StatusConflict || !strings.Contains(w.Body.String(), "key-reused") {
		t.Errorf("another body: %d %s", w.Code, w.Body)
	}
	if w := request(api, Caller{Name: "key:ci", Roles: Roles()}, "POST", "/v1/kids", "k", body); w.Code != 200 || spawned != 2 {
		t.Errorf("another caller's key: %d, %d kids", w.Code, spawned)
	}
	for range 2 { // control: what is not asked for is not done
		request(api, root, "POST", "/v1/kids", "", body)
	}
	if spawned != 4 {
		t.Errorf("%d kids, want 4", spawned)
	}
}

// TestAnExecIsRepeated: its output comes again, and is not run again.
func TestAnExecIsRepeated(t *testing.T) {
	ran := 0
	api := New(Config{Keys: keys(t), Kids: fakeKids{exec: func(_ context.Context, _, _ string, _ wire.ExecRequest, send func(wire.ExecFrame) error) error {
		ran++
		return send(wire.ExecFrame{Stdout: []byte("out"), Exit: &wire.ExecExit{Result: "exited"}})
	}}})
	first := request(api, root, "POST", "/v1/kids/a/exec", "k", `{"argv":["x"]}`)
	again := request(api, root, "POST", "/v1/kids/a/exec", "k", `{"argv":["x"]}`)
	if ran != 1 || first.Body.String() != again.Body.String() || again.Header().Get("Content-Type") != "application/x-ndjson" {
		t.Errorf("ran %d times: %q, %q as %s", ran, first.Body, again.Body, again.Header().Get("Content-Type"))
	}
	if w := request(api, root, "POST", "/v1/kids/b/exec", "k", `{"argv":["x"]}`); w.Code != http.StatusConflict {
		t.Errorf("the key for another kid: %d", w.Code)
	}
}

// TestAHandlerThatPanicsIsNotRunAgain: what it did is not known.
func TestAHandlerThatPanicsIsNotRunAgain(t *testing.T) {
	ran := 0
	api := New(Config{Keys: keys(t), Kids: fakeKids{exec: func(context.Context, string, string, wire.ExecRequest, func(wire.ExecFrame) error) error {
		ran++
		panic("half-way")
	}}})
	call := func() (w *httptest.ResponseRecorder) {
		defer func() { recover() }() // as the HTTP server does
		return request(api, root, "POST", "/v1/kids/a/exec", "k", `{"argv":["x"]}`)
	}
	call()
	if w := call(); w == nil || w.Code != http.StatusConflict || ran != 1 {
		t.Errorf("%+v after %d runs", w, ran)
	}
}

// TestRoles: a caller reaches what its roles name; without roles, or as an agent that wants to open something, nothing.
func TestRoles(t *testing.T) {
	reached := ""
	k := fakeKids{
		list:    func(context.Context) []wire.Kid { reached = "list"; return nil },
		destroy: func(_ context.Context, _, actor, _ string) error { reached = actor; return nil },
		grant: func(string, string, wire.GrantRequest) (wire.Grant, error) {
			reached = "grant"
			return wire.Grant{}, nil
		},
	}
	api := New(Config{Kids: k, Orders: onlyAda{}})
	const grant = `{"host":"h","port":1,"for_ns":1,"by":"ada","reason":"r"}`
	for _, c := range []struct {
		caller               Caller
		method, target, body string
		want                 string
	}{
		{Caller{}, "GET", "/v1/kids", "", ""},
		{Caller{Name: "key:a", Roles: []Role{RoleRead}}, "GET", "/v1/kids", "", "list"},
		{Caller{Name: "key:a", Roles: []Role{RoleRead}}, "DELETE", "/v1/kids/x", "", ""},
		{Caller{Name: "key:a", Roles: []Role{RoleDestroy}}, "DELETE", "/v1/kids/x", "", "key:a"},
		{Caller{Name: "key:a", Roles: []Role{RoleDestroy}, Agent: "m"}, "DELETE", "/v1/kids/x", "", "key:a agent:m"},
		{root, "POST", "/v1/kids/x/grants", grant, "grant"},
		{Caller{Name: "uid:0", Roles: Roles(), Agent: "m"}, "POST", "/v1/kids/x/grants", grant, ""},
		{Caller{Name: "uid:0", Roles: Roles(), Agent: "m"}, "PUT", "/v1/kids/x/policy", `{"card":"c","by":"ada","reason":"r"}`, ""},
	} {
		reached = ""
		w := request(api, c.caller, c.method, c.target, "", c.body)
		if reached != c.want || (c.want == "") != (w.Code == http.StatusForbidden) {
			t.Errorf("%+v %s %s: %d, reached %q", c.caller, c.method, c.target, w.Code, reached)
		}
	}
}

// TestOnlyRootNamesFilesOfTheMachine: a card's inputs are read with root's rights, so no key and no agent may say from where.
func TestOnlyRootNamesFilesOfTheMachine(t *testing.T) {
	planned := 0
	api := New(Config{Plan: func(wire.SpawnRequest) (kids.Plan, error) { planned++; return kids.Plan{}, nil },
		Kids: fakeKids{spawn: func(context.Context, kids.Request) (wire.Kid, error) { return wire.Kid{}, nil }}})
	const body = `{"purpose":"x","card":"c","input_dir":"/etc"}`
	for _, c := range []struct {
		caller Caller
		code   int
	}{
		{Caller{Name: "uid:0", Roles: Roles(), Local: true}, 200},
		{Caller{Name: "uid:0", Roles: Roles(), Local: true, Agent: "m"}, 403},
		{Caller{Name: "key:ci", Roles: Roles()}, 403},
	} {
		if w := request(api, c.caller, "POST", "/v1/kids", "", body); w.Code != c.code {
			t.Errorf("%+v: %d %s", c.caller, w.Code, w.Body)
		}
	}
	if planned != 1 {
		t.Errorf("%d cards were read with their inputs", planned)
	}
}

// TestPages walks a list in parts; what goes meanwhile hides nothing else.
func TestPages(t *testing.T) {
	all := []wire.Kid{{Name: "a"}, {Name: "b"}, {Name: "c"}, {Name: "d"}, {Name: "e"}}
	api := New(Config{Kids: fakeKids{list: func(context.Context) []wire.Kid { return append([]wire.Kid(nil), all...) }}})
	got := ""
	for target := "/v1/kids?limit=2"; target != ""; {
		w := request(api, root, "GET", target, "", "")
		var page []wire.Kid
		if err := json.Unmarshal(w.Body.Bytes(), &page); err != nil || w.Code != 200 {
			t.Fatalf("%s: %d %s %v", target, w.Code, w.Body, err)
		}
		for _, k := range page {
			got += k.Name
		}
		link := w.Header().Get("Link")
		target, _, _ = strings.Cut(strings.TrimPrefix(link, "<"), ">")
		all = all[1:] // a kid goes between the pages
	}
	if got != "abcde" {
		t.Errorf("the pages held %s", got)
	}
	if w := request(api, root, "GET", "/v1/kids?limit=0", "", ""); w.Code != http.StatusUnprocessableEntity {
		t.Errorf("limit 0: %d", w.Code)
	}
}

// TestTheCommittedDescriptionIsTheCodes.
func TestTheCommittedDescriptionIsTheCodes(t *testing.T) {
	want, err := New(Config{}).Document()
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile("../../deploy/schema/openapi.json")
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("deploy/schema/openapi.json is behind (%v): run `make openapi`", err)
	}
	if w := request(New(Config{}), root, "GET", "/v1/openapi.json", "", ""); w.Code != 200 || !bytes.Equal(w.Body.Bytes(), want) {
		t.Errorf("served: %d, %d bytes instead of %d", w.Code, w.Body.Len(), len(want))
	}
	if w := request(New(Config{}), root, "GET", "/v1/nothing", "", ""); w.Code != 404 || !strings.Contains(w.Body.String(), `"status":404`) {
		t.Errorf("an unknown route: %d %s", w.Code, w.Body)
	}
}
