package e2e

import (
	"context"
	"encoding/json"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"tagout/internal/audit"
	"tagout/internal/config"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// agent is an MCP client of the sdk, connected.
func agent(t *testing.T, over sdk.Transport) *sdk.ClientSession {
	t.Helper()
	s, err := sdk.NewClient(&sdk.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(), over, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() }) // the server ends with it
	return s
}

// use calls a tool; out may be nil. It returns why the tool refused, "" where it did not.
func use(t *testing.T, s *sdk.ClientSession, tool string, args, out any) string {
	t.Helper()
	res, err := s.CallTool(t.Context(), &sdk.CallToolParams{Name: tool, Arguments: args})
	if err != nil {
		return err.Error()
	}
	if res.IsError {
		return res.Content[0].(*sdk.TextContent).Text
	}
	raw, err := json.Marshal(res.StructuredContent)
	if err == nil && out != nil {
		err = json.Unmarshal(raw, out)
	}
	if err != nil {
		t.Fatal(err)
	}
	return ""
}

type bearerTrip struct{ key string }

func (b bearerTrip) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+b.key)
	return http.DefaultTransport.RoundTrip(r)
}

// TestAnAgentUsesKids walks a kid's life with the sdk's own client, on standard input and output and over HTTP: the
// tools and their schemas, a resource for each kid, every call recorded and redacted, and nothing that opens anything.
func TestAnAgentUsesKids(t *testing.T) {
	t.Parallel()
	addr := freePort(t)
	box := testenv.StartWith(t, func(b *config.Box) { b.API.Listen = addr })
	key := strings.TrimSpace(box.Must("apikey", "add", "bot", "--role", "read,spawn,exec,files,destroy,grant"))
	cmd := exec.CommandContext(context.Background(), box.Bin+"/tagout", "--instance", box.Inst.Name(), "mcp", "--agent", "helper")
	for name, over := range map[string]sdk.Transport{
		"uid:0 agent:helper": &sdk.CommandTransport{Command: cmd},
		"key:bot agent:mcp":  &sdk.StreamableClientTransport{Endpoint: "http://" + addr.String() + "/mcp", HTTPClient: &http.Client{Transport: bearerTrip{key}}, DisableStandaloneSSE: true},
	} {
		t.Run(name, func(t *testing.T) {
			box := box.For(t)
			s := agent(t, over)
			tools, err := s.ListTools(t.Context(), nil)
			if err != nil || len(tools.Tools) != 6 {
				t.Fatalf("tools: %+v %v", tools, err)
			}
			for _, tool := range tools.Tools {
				reads := tool.Name == "kid_list" || tool.Name == "kid_read_file"
				if tool.InputSchema == nil || tool.OutputSchema == nil || tool.Annotations == nil || tool.Annotations.ReadOnlyHint != reads {
					t.Errorf("%s: %+v", tool.Name, tool.Annotations)
				}
				for _, word := range []string{"grant", "release", "policy", "approve"} {
					if strings.Contains(tool.Name, word) {
						t.Errorf("an agent has a tool %s", tool.Name)
					}
				}
			}
			var kid struct{ Name, State string }
			if why := use(t, s, "kid_spawn", map[string]any{"purpose": "try", "card": bareCard}, &kid); why != "" || kid.State != "running" {
				t.Fatalf("spawn: %q %+v", why, kid)
			}
			var twin struct {
				Name     string
				SameCard []string `json:"same_card"`
			}
			if why := use(t, s, "kid_spawn", map[string]any{"purpose": "try", "card": bareCard}, &twin); why != "" || !slices.Equal(twin.SameCard, []string{kid.Name}) {
				t.Errorf("a second kid of the card: %q %+v", why, twin)
			}
			if why := use(t, s, "kid_destroy", map[string]any{"kid": twin.Name, "reason": "one is enough"}, nil); why != "" {
				t.Error(why)
			}
			if why := use(t, s, "kid_write_file", map[string]any{"kid": kid.Name, "path": "/workspace/f", "content": "hello", "mode": "0600"}, nil); why != "" {
				t.Error(why)
			}
			var ran struct {
				Result         string
				Code           int
				Stdout, Stderr struct {
					Text   string
					Base64 bool
					Cut    int64 `json:"cut_bytes"`
				}
			}
			const secret = "password=hunter2hunter2"
			if why := use(t, s, "kid_exec", map[string]any{"kid": kid.Name, "shell": "cat f; printf '\\377' >&2; : " + secret + "; exit 7"}, &ran); why != "" ||
				ran.Code != 7 || ran.Stdout.Text != "hello" || ran.Stderr.Text != "/w==" || !ran.Stderr.Base64 {
				t.Errorf("exec: %q %+v", why, ran)
			}
			if why := use(t, s, "kid_exec", map[string]any{"kid": kid.Name, "shell": "head -c 20000000 /dev/zero | tr '\\0' x"}, &ran); why != "" || len(ran.Stdout.Text) != 256<<10 || ran.Stdout.Cut != 20000000-256<<10 {
				t.Errorf("much output: %q %d and %d cut", why, len(ran.Stdout.Text), ran.Stdout.Cut)
			}
			var read struct {
				Content struct{ Text string }
				Size    int64
			}
			if why := use(t, s, "kid_read_file", map[string]any{"kid": kid.Name, "path": "/workspace/f"}, &read); why != "" || read.Content.Text != "hello" || read.Size != 5 {
				t.Errorf("read: %q %+v", why, read)
			}
			box.Sh(kid.Name, "ln -s /etc/passwd /workspace/l")
			if why := use(t, s, "kid_read_file", map[string]any{"kid": kid.Name, "path": "/workspace/l"}, nil); !strings.Contains(why, "link") {
				t.Errorf("through a link: %q", why)
			}
			if why := use(t, s, "kid_exec", map[string]any{"kid": "nobody", "shell": "true"}, nil); !strings.Contains(why, "nobody") {
				t.Errorf("no such kid: %q", why)
			}
			if why := use(t, s, "kid_grant", map[string]any{}, nil); why == "" {
				t.Error("there is a tool for grants")
			}
			list, err := s.ListResources(t.Context(), nil)
			if err != nil || len(list.Resources) != 1 || list.Resources[0].URI != "kid://"+kid.Name {
				t.Errorf("resources: %+v %v", list, err)
			}
			res, err := s.ReadResource(t.Context(), &sdk.ReadResourceParams{URI: "kid://" + kid.Name})
			var known wire.Kid
			if err != nil || json.Unmarshal([]byte(res.Contents[0].Text), &known) != nil || known.Name != kid.Name {
				t.Errorf("resource: %+v %v", res, err)
			}
			if _, err := s.ReadResource(t.Context(), &sdk.ReadResourceParams{URI: "kid://nobody"}); err == nil {
				t.Error("a resource of no kid")
			}
			var gone struct {
				Gone   bool
				Lesson string
			}
			if why := use(t, s, "kid_destroy", map[string]any{"kid": kid.Name, "reason": "done", "lesson": "It works, " + secret}, &gone); why != "" || !gone.Gone {
				t.Errorf("destroy: %q %+v", why, gone)
			}
			if note := box.Must("lessons", "show", gone.Lesson); !strings.Contains(note, "It works, password="+audit.Redacted) || !strings.Contains(note, name) {
				t.Errorf("the lesson: %s", note)
			}
			calls := map[string]int{}
			box.WaitRecord("the destroy", func(r *audit.Record) bool {
				return r.Event == audit.EventToolCalled && r.Actor == name && r.Fields["tool"] == "kid_destroy" && strings.Contains(r.Fields["arguments"], "It works")
			})
			for _, r := range box.Records(func(r *audit.Record) bool { return r.Event == audit.EventToolCalled && r.Actor == name }) {
				calls[r.Fields["tool"]]++
				if about := r.Fields["tool"] == "kid_exec" && !strings.Contains(r.Fields["arguments"], "nobody"); about && r.Kid != kid.Name {
					t.Errorf("a call about %s is in the timeline of %q", kid.Name, r.Kid)
				}
				if strings.Contains(r.Fields["arguments"], "hunter2") {
					t.Errorf("a record holds a password: %s", r.Fields["arguments"])
				}
			}
			if calls["kid_spawn"] != 2 || calls["kid_exec"] != 3 || calls["kid_write_file"] != 1 || calls["kid_read_file"] != 2 || calls["kid_grant"] != 1 {
				t.Errorf("recorded calls: %v", calls)
			}
		})
	}
	// Control: what an agent may not, its key may where no agent asks, as far as a person of the box allows it.
	for agent, want := range map[string]string{"": "", "x": "agent"} {
		kid := box.Spawn(bareCard, nil)
		req, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+addr.String()+"/v1/kids/"+kid.Name+"/grants", strings.NewReader(`{"host":"a.test","port":443,"for_ns":60000000000,"by":"nobody","reason":"r"}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+key)
		req.Header.Set("Content-Type", "application/json")
		if agent != "" {
			req.Header.Set("Tagout-Agent", agent)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		var p wire.Problem
		if err := json.NewDecoder(resp.Body).Decode(&p); err != nil || resp.StatusCode != http.StatusForbidden || strings.Contains(p.Detail, "AI agent") != (want != "") {
			t.Errorf("a grant as agent %q: %d %+v %v", agent, resp.StatusCode, p, err)
		}
		resp.Body.Close() // read whole
	}
}
