// Package mcp lets AI agents use kids through the Model Context Protocol: as tools, each with a schema of what it takes
// and gives, and as a resource for each kid. It is a client of the API and can do nothing that the API does not let its
// caller do. It promises that each call of a tool is in the audit log, with its arguments, before anything is done; and
// that no agent opens anything: there is no tool for grants, policies or releases, and the API refuses them to whoever
// says that an agent asks.
package mcp

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/wire"
)

// scheme begins the address of a kid's resource.
const scheme = "kid://"

const instructions = `Kids are disposable sandboxes. Spawn one from a job card (YAML), run commands in it, read and write files below
/workspace and /tmp, and destroy it when it is no longer needed. A kid reaches only the hosts that its card names; ask a
person where it needs more.`

// server answers one client.
type server struct{ api *control.Client }

// New returns a server whose tools call the API through c, in the name of an agent.
func New(c *control.Client, version string) *sdk.Server {
	s := &server{api: c}
	out := sdk.NewServer(&sdk.Implementation{Name: "tagout", Version: version}, &sdk.ServerOptions{Instructions: instructions})
	s.tools(out)
	out.AddResourceTemplate(&sdk.ResourceTemplate{URITemplate: scheme + "{name}", Name: "kid", MIMEType: "application/json",
		Description: "What is known of a kid: its state, card, purpose and address."}, s.read)
	out.AddReceivingMiddleware(s.note, s.list)
	return out
}

// note has each call of a tool recorded before it is carried out. What cannot be recorded is not done.
func (s *server) note(next sdk.MethodHandler) sdk.MethodHandler {
	return func(ctx context.Context, method string, req sdk.Request) (sdk.Result, error) {
		if call, ok := req.(*sdk.CallToolRequest); ok {
			sum := sha256.Sum256(call.Params.Arguments)
			note := wire.ToolCall{
				Tool: call.Params.Name, Kid: named(call.Params.Arguments), Arguments: shorten(call.Params.Arguments),
				SHA256: hex.EncodeToString(sum[:]), Bytes: len(call.Params.Arguments),
			}
			if err := s.api.Call(ctx, http.MethodPost, "/v1/tool-calls", note, nil); err != nil {
				return nil, fmt.Errorf("recording the call: nothing was done: %w", err)
			}
		}
		return next(ctx, method, req)
	}
}

// named is the kid that a call is about, as the agent says, so that the call is in that kid's timeline. "" is none.
func named(raw json.RawMessage) string {
	var args struct{ Kid, Name string }
	const longest = 64
	if json.Unmarshal(raw, &args) != nil || len(args.Kid) > longest || len(args.Name) > longest {
		return ""
	}
	return cmp.Or(args.Kid, args.Name)
}

// Bounds of what a record says of a call.
const (
	maxText      = 512
	maxArguments = 4096
)

// shorten returns the arguments with long texts cut, as JSON: a record is no place for the contents of a file. Secrets go
// first, as long as each text is itself and whole: what is left of one that was cut, or quoted, has no shape any more.
func shorten(raw json.RawMessage) string {
	var v any
	if json.Unmarshal(raw, &v) != nil {
		return cut(audit.Redact(string(raw)), maxText)
	}
	out, err := json.Marshal(cutTexts(v))
	if err != nil {
		return cut(audit.Redact(string(raw)), maxText)
	}
	return cut(string(out), maxArguments)
}

func cutTexts(v any) any {
	switch v := v.(type) {
	case string:
		return cut(audit.Redact(v), maxText)
	case []any:
		for i := range v {
			v[i] = cutTexts(v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = cutTexts(v[k])
		}
	}
	return v
}

func cut(s string, most int) string {
	if len(s) <= most {
		return s
	}
	// The word in which it is cut goes: of a secret nobody would recognise the half.
	return fmt.Sprintf("%s (%d bytes)", audit.WithoutLastWord(strings.ToValidUTF8(s[:most], "")), len(s))
}

// list shows a resource for each kid.
func (s *server) list(next sdk.MethodHandler) sdk.MethodHandler {
	return func(ctx context.Context, method string, req sdk.Request) (sdk.Result, error) {
		if method != "resources/list" {
			return next(ctx, method, req)
		}
		var kids []wire.Kid
		if err := s.api.Call(ctx, http.MethodGet, "/v1/kids", nil, &kids); err != nil {
			return nil, err
		}
		out := &sdk.ListResourcesResult{Resources: []*sdk.Resource{}}
		for _, k := range kids {
			out.Resources = append(out.Resources, &sdk.Resource{URI: scheme + k.Name, Name: k.Name, MIMEType: "application/json",
				Description: fmt.Sprintf("%s, for: %s", k.State, k.Purpose)})
		}
		return out, nil
	}
}

// read returns what is known of one kid.
func (s *server) read(ctx context.Context, req *sdk.ReadResourceRequest) (*sdk.ReadResourceResult, error) {
	name, ok := strings.CutPrefix(req.Params.URI, scheme)
	if !ok || name == "" {
		return nil, sdk.ResourceNotFoundError(req.Params.URI)
	}
	var kid wire.Kid
	if err := s.api.Call(ctx, http.MethodGet, route(name, ""), nil, &kid); control.Status(err) == http.StatusNotFound {
		return nil, sdk.ResourceNotFoundError(req.Params.URI)
	} else if err != nil {
		return nil, err
	}
	raw, err := json.MarshalIndent(kid, "", "  ")
	if err != nil {
		return nil, err
	}
	return &sdk.ReadResourceResult{Contents: []*sdk.ResourceContents{{URI: req.Params.URI, MIMEType: "application/json", Text: string(raw)}}}, nil
}

// route is the path of something about a kid.
func route(kid, rest string) string { return "/v1/kids/" + url.PathEscape(kid) + rest }

// Stdio serves one client on standard input and output until it goes away or ctx ends.
func Stdio(ctx context.Context, s *sdk.Server) error {
	err := s.Run(ctx, &sdk.StdioTransport{})
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}
