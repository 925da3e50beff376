package e2e

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/config"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// TestALostAnswerIsAskedForAgain (K12): the same Idempotency-Key is the same kid, also for the sandboxd after the one
// that was killed; another body is a conflict.
func TestALostAnswerIsAskedForAgain(t *testing.T) {
	t.Parallel()
	box := start(t)
	req := wire.SpawnRequest{Purpose: t.Name(), Card: bareCard}
	spawn := func(key string, req wire.SpawnRequest) (kid wire.Kid, err error) {
		return kid, box.Client(instance.Sandboxd).With("Idempotency-Key", key).Call(t.Context(), http.MethodPost, "/v1/kids", req, &kid)
	}
	first, err := spawn("k", req)
	if err != nil {
		t.Fatal(err)
	}
	check := func(when string) {
		t.Helper()
		if again, err := spawn("k", req); err != nil || again.Session != first.Session {
			t.Errorf("%s: %+v %v, want session %s", when, again, err, first.Session)
		}
		other := req
		other.Purpose = "another"
		if _, err := spawn("k", other); control.Status(err) != http.StatusConflict {
			t.Errorf("%s: the key with another body: %v", when, err)
		}
	}
	check("at once")
	box.Kill9(instance.Sandboxd)
	box.WaitHealthy(instance.Sandboxd)
	check("after kill -9")
	if second, err := spawn("l", req); err != nil || second.Session == first.Session {
		t.Errorf("control, another key: %+v %v", second, err)
	}
	var kids []wire.Kid
	if err := box.Client(instance.Sandboxd).Call(t.Context(), http.MethodGet, "/v1/kids", nil, &kids); err != nil || len(kids) != 2 {
		t.Errorf("%d kids, want 2: %v", len(kids), err)
	}
}

// TestFilesGoInAndOut by the CLI, whole directories too, and nothing that a kid makes of them leads out (K06, K07).
func TestFilesGoInAndOut(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(bareCard, nil).Name
	dir := t.TempDir()
	big := bytes.Repeat([]byte("0123456789abcdef"), 512<<10) // 8 MiB, more than a request with JSON may have
	if err := errors.Join(os.MkdirAll(dir+"/in/sub", 0o755), os.WriteFile(dir+"/in/sub/big", big, 0o750), os.WriteFile(dir+"/in/small", []byte("s\xff"), 0o644)); err != nil {
		t.Fatal(err)
	}
	box.Must("put", dir+"/in", kid+":/workspace/tree")
	box.Must("put", dir+"/in/small", kid+":/tmp/small")
	sum := fmt.Sprintf("%x", sha256.Sum256(big))
	if out := box.Sh(kid, "sha256sum < /workspace/tree/sub/big; stat -c %a /workspace/tree/sub/big; cat /tmp/small"); out.Stdout != sum+"  -\n750\ns\xff" {
		t.Fatalf("the kid sees %q %q", out.Stdout, out.Stderr)
	}
	box.Must("get", "--dir", kid+":/workspace/tree", dir+"/out")
	if raw, err := os.ReadFile(dir + "/out/sub/big"); err != nil || !bytes.Equal(raw, big) {
		t.Errorf("%d bytes came back, %v", len(raw), err)
	}
	if out := box.Must("get", kid+":/tmp/small", "-"); out != "s\xff" {
		t.Errorf("got %q", out)
	}
	box.Sh(kid, "cd /workspace/tree; ln -s / root; truncate -s 5G /workspace/sparse; printf x > '/workspace/\x1b[2J'")
	for args, want := range map[string]string{
		"get " + kid + ":/workspace/tree/root/etc/passwd -":               "link",
		"get " + kid + ":/workspace/sparse -":                             "holds",
		"get " + kid + ":/etc/passwd -":                                   "not below",
		"get --dir " + kid + ":/workspace/tree " + dir + "/refused":       "leave them out",
		"put " + dir + "/in/small " + kid + ":/workspace/tree/root/tmp/x": "link",
	} {
		if r := box.Tagout(strings.Fields(args)...); r.Code != 2 || !strings.Contains(r.Stderr, want) || r.Stdout != "" {
			t.Errorf("tagout %s: %d %q %q", args, r.Code, r.Stdout, r.Stderr)
		}
	}
	if _, err := os.Stat(dir + "/refused"); err == nil {
		t.Error("a refused directory was made")
	}
	box.Must("get", "--dir", "--skip-special", kid+":/workspace/tree", dir+"/rest")
	if list := box.Must("ls", kid); !strings.Contains(list, "sparse") || strings.Contains(list, "\x1b") {
		t.Errorf("ls: %q", list)
	}
	box.WaitRecord("a refused read", func(r *audit.Record) bool {
		return r.Event == audit.EventFileRead && r.Reason == reason.PathRefused && r.Kid == kid && r.Actor == "uid:0"
	})
}

// TestTheAPIOverTCP: a key opens what its roles name and nothing more, from the moment it is made to that at which it is
// removed; each call is recorded with who made it.
func TestTheAPIOverTCP(t *testing.T) {
	t.Parallel()
	addr := freePort(t)
	box := testenv.StartWith(t, func(b *config.Box) { b.API.Listen = addr })
	reader := strings.TrimSpace(box.Must("apikey", "add", "reader", "--role", "read"))
	maker := strings.TrimSpace(box.Must("apikey", "add", "maker", "--role", "read,spawn,exec,destroy", "--for", "1h"))
	call := func(key, method, route string, in, out any) int {
		t.Helper()
		raw, err := json.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(t.Context(), method, "http://"+addr.String()+route, bytes.NewReader(raw))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+key)
		req.Header.Set("Content-Type", "application/json")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close() // read whole
		switch out := out.(type) {
		case nil:
		case *execFrames:
			err = out.read(resp.Body)
		default:
			err = json.NewDecoder(resp.Body).Decode(out)
		}
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode
	}
	req := wire.SpawnRequest{Purpose: t.Name(), Card: bareCard}
	if code := call(reader, "POST", "/v1/kids", req, nil); code != http.StatusForbidden {
		t.Errorf("a reader spawns: %d", code)
	}
	var kid wire.Kid
	if code := call(maker, "POST", "/v1/kids", req, &kid); code != http.StatusOK || kid.Name == "" {
		t.Fatalf("spawn: %d %+v", code, kid)
	}
	var out execFrames
	if code := call(maker, "POST", "/v1/kids/"+kid.Name+"/exec", wire.ExecRequest{Argv: []string{"echo", "hi"}}, &out); code != http.StatusOK || out.stdout != "hi\n" {
		t.Errorf("exec: %d %+v", code, out)
	}
	if code := call(maker, "GET", "/v1/kids/"+kid.Name+"/files?path=/workspace/x", nil, nil); code != http.StatusForbidden {
		t.Errorf("files without the role: %d", code)
	}
	if code := call("tgk_guess", "GET", "/v1/kids", nil, nil); code != http.StatusUnauthorized {
		t.Errorf("a guessed key: %d", code)
	}
	if list := box.Must("apikey", "ls"); !strings.Contains(list, "reader") || strings.Contains(list, reader) {
		t.Errorf("apikey ls: %s", list)
	}
	box.Must("apikey", "rm", "maker")
	if code := call(maker, "DELETE", "/v1/kids/"+kid.Name+"?reason=x", nil, nil); code != http.StatusUnauthorized {
		t.Errorf("a removed key: %d", code)
	}
	box.WaitRecord("the refused spawn", func(r *audit.Record) bool {
		return r.Event == audit.EventAPICalled && r.Actor == "key:reader" && r.Outcome == audit.OutcomeDeny && r.Fields["status"] == "403"
	})
	box.WaitRecord("the stranger", func(r *audit.Record) bool { return r.Event == audit.EventAPIRefused })
	box.WaitRecord("the kid's maker", func(r *audit.Record) bool {
		return r.Event == audit.EventKidSpawned && r.Kid == kid.Name && r.Actor == "key:maker"
	})
}

// execFrames is the answer to an exec, which is one frame a line.
type execFrames struct{ id, stdout string }

// read returns an error unless the command ended with 0.
func (e *execFrames) read(body io.Reader) error {
	for dec := json.NewDecoder(body); ; {
		var f wire.ExecFrame
		if err := dec.Decode(&f); err != nil {
			return fmt.Errorf("no frame says how the command ended: %w", err)
		}
		if f.ID != "" {
			e.id = f.ID
		}
		e.stdout += string(f.Stdout)
		if f.Exit == nil {
			continue
		}
		if f.Exit.Code != 0 || e.id == "" {
			return fmt.Errorf("command %q ended with %+v", e.id, f.Exit)
		}
		return nil
	}
}

// freePort returns an address on which nobody listens.
func freePort(t *testing.T) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() // to be used again
	return netip.MustParseAddrPort(l.Addr().String())
}

// TestAKidsEventsAreFollowed, from real daemons, to the kid's end.
func TestAKidsEventsAreFollowed(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(bareCard, nil).Name
	resp, err := box.Client(instance.Sandboxd).Do(t.Context(), http.MethodGet, "/v1/kids/"+kid+"/events", nil, "")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() // read whole
	box.Sh(kid, "exec 3<>/dev/tcp/192.0.2.1/80")
	box.Destroy(kid)
	raw, err := io.ReadAll(resp.Body) // it ends with the kid
	if err != nil {
		t.Fatal(err)
	}
	for _, event := range []string{audit.EventExecStarted, audit.EventExecEnded, audit.EventKidDestroyed} {
		if !strings.Contains(string(raw), "\nevent: "+event+"\ndata: {") {
			t.Errorf("no %s in %s", event, raw)
		}
	}
}
