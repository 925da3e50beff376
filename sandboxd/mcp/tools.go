package mcp

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"
	"unicode/utf8"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"tagout/internal/wire"
)

// Bounds of what goes through an agent's context.
const (
	maxOutput      = 256 << 10 // bytes of each of a command's streams
	maxRead        = 1 << 20   // bytes of a file
	defaultTimeout = 2 * time.Minute
	maxTimeout     = time.Hour
)

func (s *server) tools(out *sdk.Server) {
	yes, no := true, false
	sdk.AddTool(out, &sdk.Tool{Name: "kid_spawn", Description: "Make a kid, a disposable sandbox, from a job card. Nothing runs in it yet.",
		Annotations: &sdk.ToolAnnotations{Title: "Make a kid", DestructiveHint: &no, OpenWorldHint: &no}}, s.spawn)
	sdk.AddTool(out, &sdk.Tool{Name: "kid_exec", Description: "Run a command in a kid, and return its output and how it ended.",
		Annotations: &sdk.ToolAnnotations{Title: "Run a command in a kid", DestructiveHint: &yes, OpenWorldHint: &yes}}, s.exec)
	sdk.AddTool(out, &sdk.Tool{Name: "kid_list", Description: "List the kids that there are.",
		Annotations: &sdk.ToolAnnotations{Title: "List the kids", ReadOnlyHint: true, IdempotentHint: true, OpenWorldHint: &no}}, s.kids)
	sdk.AddTool(out, &sdk.Tool{Name: "kid_read_file", Description: "Read a file below /workspace or /tmp of a kid. Links are not followed.",
		Annotations: &sdk.ToolAnnotations{Title: "Read a kid's file", ReadOnlyHint: true, IdempotentHint: true, OpenWorldHint: &no}}, s.readFile)
	sdk.AddTool(out, &sdk.Tool{Name: "kid_write_file", Description: "Write a file below /workspace or /tmp of a kid, whole. Its directory must exist.",
		Annotations: &sdk.ToolAnnotations{Title: "Write a kid's file", DestructiveHint: &yes, IdempotentHint: true, OpenWorldHint: &no}}, s.writeFile)
	sdk.AddTool(out, &sdk.Tool{Name: "kid_destroy", Description: "Destroy a kid with everything in it. What was learned from it can be kept as a note.",
		Annotations: &sdk.ToolAnnotations{Title: "Destroy a kid", DestructiveHint: &yes, IdempotentHint: true, OpenWorldHint: &no}}, s.destroy)
}

// Kid is what an agent sees of a kid.
type Kid struct {
	Name    string `json:"name" jsonschema:"the kid's name"`
	State   string `json:"state" jsonschema:"where it is in its life; commands run only in a kid that is running"`
	Purpose string `json:"purpose"`
	Card    string `json:"card" jsonschema:"name of its job card"`
	Created string `json:"created" jsonschema:"RFC 3339"`

	SameCard []string `json:"same_card,omitempty" jsonschema:"other kids of this card that there were when it was made: use one of these, or destroy them"`
}

func kidOf(k wire.Kid) Kid {
	return Kid{Name: k.Name, State: string(k.State), Purpose: k.Purpose, Card: k.Card, Created: k.Created.UTC().Format(time.RFC3339), SameCard: k.SameCard}
}

// SpawnInput asks for a kid.
type SpawnInput struct {
	Name    string `json:"name,omitempty" jsonschema:"a name for the kid; one is made up where this is left out"`
	Purpose string `json:"purpose" jsonschema:"why it is needed, for the record"`
	Card    string `json:"card" jsonschema:"the job card, as YAML text; one without inputs"`
}

func (s *server) spawn(ctx context.Context, _ *sdk.CallToolRequest, in SpawnInput) (*sdk.CallToolResult, Kid, error) {
	var kid wire.Kid
	err := s.api.Call(ctx, http.MethodPost, "/v1/kids", wire.SpawnRequest{Name: in.Name, Purpose: in.Purpose, Card: in.Card}, &kid)
	return nil, kidOf(kid), err
}

// ListOutput is all kids, by name.
type ListOutput struct {
	Kids []Kid `json:"kids"`
}

func (s *server) kids(ctx context.Context, _ *sdk.CallToolRequest, _ struct{}) (*sdk.CallToolResult, ListOutput, error) {
	var list []wire.Kid
	out := ListOutput{Kids: []Kid{}}
	err := s.api.Call(ctx, http.MethodGet, "/v1/kids", nil, &list)
	for _, k := range list {
		out.Kids = append(out.Kids, kidOf(k))
	}
	return nil, out, err
}

// ExecInput is a command.
type ExecInput struct {
	Kid     string            `json:"kid" jsonschema:"the kid's name"`
	Argv    []string          `json:"argv,omitempty" jsonschema:"the command and its arguments; or give shell"`
	Shell   string            `json:"shell,omitempty" jsonschema:"a line for /bin/sh; or give argv"`
	Dir     string            `json:"dir,omitempty" jsonschema:"working directory, absolute; /workspace where this is left out"`
	Env     map[string]string `json:"env,omitempty" jsonschema:"more environment"`
	Stdin   string            `json:"stdin,omitempty" jsonschema:"what the command reads"`
	Timeout int               `json:"timeout_seconds,omitempty" jsonschema:"the command is killed after this long; 120 where this is left out, at most 3600"`
}

// ExecOutput is how a command ended and what it wrote.
type ExecOutput struct {
	Result string `json:"result" jsonschema:"exited, signaled, timeout, stopped, oom, killed, failed or unknown"`
	Code   int    `json:"code" jsonschema:"exit code"`
	Signal string `json:"signal,omitempty"`
	Detail string `json:"detail,omitempty"`
	Stdout Text   `json:"stdout"`
	Stderr Text   `json:"stderr"`
}

// Text is bytes, as text where they are some.
type Text struct {
	Text   string `json:"text"`
	Base64 bool   `json:"base64,omitempty" jsonschema:"the bytes are no UTF-8, and text is their base64"`
	Cut    int64  `json:"cut_bytes,omitempty" jsonschema:"so many bytes more followed and are left out"`
}

// keep collects a stream's first bytes.
type keep struct {
	raw []byte
	cut int64
}

func (k *keep) add(p []byte) {
	n := min(len(p), maxOutput-len(k.raw))
	k.raw = append(k.raw, p[:n]...)
	k.cut += int64(len(p) - n)
}

func textOf(raw []byte, cut int64) Text {
	if utf8.Valid(raw) {
		return Text{Text: string(raw), Cut: cut}
	}
	return Text{Text: base64.StdEncoding.EncodeToString(raw), Base64: true, Cut: cut}
}

func (s *server) exec(ctx context.Context, _ *sdk.CallToolRequest, in ExecInput) (*sdk.CallToolResult, ExecOutput, error) {
	argv := in.Argv
	switch {
	case (len(argv) == 0) == (in.Shell == ""):
		return nil, ExecOutput{}, errors.New("give either argv or shell")
	case in.Shell != "":
		argv = []string{"/bin/sh", "-c", in.Shell}
	}
	timeout := time.Duration(in.Timeout) * time.Second
	switch {
	case timeout == 0:
		timeout = defaultTimeout
	case timeout < 0 || timeout > maxTimeout:
		return nil, ExecOutput{}, fmt.Errorf("timeout_seconds: give 1 to %d", int(maxTimeout.Seconds()))
	}
	var stdout, stderr keep
	var exit *wire.ExecExit
	req := wire.ExecRequest{Argv: argv, Dir: in.Dir, Env: in.Env, Stdin: []byte(in.Stdin), Timeout: timeout}
	err := s.api.Each(ctx, http.MethodPost, route(in.Kid, "/exec"), req, func(line json.RawMessage) error {
		var f wire.ExecFrame
		if err := json.Unmarshal(line, &f); err != nil {
			return err
		}
		stdout.add(f.Stdout)
		stderr.add(f.Stderr)
		if f.Exit != nil {
			exit = f.Exit
		}
		return nil
	})
	if err == nil && exit == nil {
		err = errors.New("the connection ended before the command did")
	}
	if err != nil {
		return nil, ExecOutput{}, err
	}
	return nil, ExecOutput{Result: exit.Result, Code: exit.Code, Signal: exit.Signal, Detail: exit.Detail,
		Stdout: textOf(stdout.raw, stdout.cut), Stderr: textOf(stderr.raw, stderr.cut)}, nil
}

// ReadInput names a file.
type ReadInput struct {
	Kid  string `json:"kid" jsonschema:"the kid's name"`
	Path string `json:"path" jsonschema:"absolute path below /workspace or /tmp"`
}

// ReadOutput is a file's beginning, of at most 1 MiB.
type ReadOutput struct {
	Content Text  `json:"content"`
	Size    int64 `json:"size"`
}

func filesRoute(kid, path string) string {
	return route(kid, "/files?"+url.Values{"path": {path}}.Encode())
}

func (s *server) readFile(ctx context.Context, _ *sdk.CallToolRequest, in ReadInput) (*sdk.CallToolResult, ReadOutput, error) {
	resp, err := s.api.Do(ctx, http.MethodGet, filesRoute(in.Kid, in.Path), nil, "")
	if err != nil {
		return nil, ReadOutput{}, err
	}
	defer resp.Body.Close() // what is not read is left out on purpose
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxRead))
	if err != nil {
		return nil, ReadOutput{}, fmt.Errorf("reading %s: %w", in.Path, err)
	}
	size := max(resp.ContentLength, int64(len(raw)))
	return nil, ReadOutput{Content: textOf(raw, size-int64(len(raw))), Size: size}, nil
}

// WriteInput is a file's content.
type WriteInput struct {
	Kid     string `json:"kid" jsonschema:"the kid's name"`
	Path    string `json:"path" jsonschema:"absolute path below /workspace or /tmp"`
	Content string `json:"content" jsonschema:"what the file will hold"`
	Base64  bool   `json:"base64,omitempty" jsonschema:"content is base64"`
	Mode    string `json:"mode,omitempty" jsonschema:"permission bits, octal; 0644 where this is left out"`
}

// WriteOutput says how much was written.
type WriteOutput struct {
	Bytes int64 `json:"bytes"`
}

func (s *server) writeFile(ctx context.Context, _ *sdk.CallToolRequest, in WriteInput) (*sdk.CallToolResult, WriteOutput, error) {
	raw := []byte(in.Content)
	if in.Base64 {
		var err error
		if raw, err = base64.StdEncoding.DecodeString(in.Content); err != nil {
			return nil, WriteOutput{}, fmt.Errorf("content: %w", err)
		}
	}
	where := filesRoute(in.Kid, in.Path)
	if in.Mode != "" {
		where += "&mode=" + url.QueryEscape(in.Mode)
	}
	resp, err := s.api.Do(ctx, http.MethodPut, where, bytes.NewReader(raw), "application/octet-stream")
	if err != nil {
		return nil, WriteOutput{}, err
	}
	defer resp.Body.Close() // read whole
	var done wire.Carried
	err = json.NewDecoder(resp.Body).Decode(&done)
	return nil, WriteOutput{Bytes: done.Bytes}, err
}

// DestroyInput names a kid.
type DestroyInput struct {
	Kid    string `json:"kid" jsonschema:"the kid's name"`
	Reason string `json:"reason" jsonschema:"why, for the record"`
	Lesson string `json:"lesson,omitempty" jsonschema:"what was learned, as Markdown, for whoever does the like again; kept with secrets taken out, 16 KiB at most"`
}

// DestroyOutput says that the kid is gone.
type DestroyOutput struct {
	Gone   bool   `json:"gone"`
	Lesson string `json:"lesson,omitempty" jsonschema:"name of the note that was kept"`

	Credentials *wire.CredentialUse `json:"credentials,omitempty" jsonschema:"what it made of the secrets that it was granted"`
}

func (s *server) destroy(ctx context.Context, _ *sdk.CallToolRequest, in DestroyInput) (*sdk.CallToolResult, DestroyOutput, error) {
	var done wire.DestroyReply
	err := s.api.Call(ctx, http.MethodPost, route(in.Kid, "/destroy"), wire.DestroyRequest{Reason: in.Reason, Lesson: in.Lesson}, &done)
	return nil, DestroyOutput{Gone: err == nil, Lesson: done.Lesson, Credentials: done.Credentials}, err
}
