package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"io/fs"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/config"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/testroot"
	"tagout/internal/wire"
)

const (
	testInstance = "tcredd1"
	testValue    = "vendor-s3cret-0123456789"
)

// world is an instance with credd's directories and a killswitchd that only lists tags.
type world struct {
	t      *testing.T
	inst   instance.Instance
	binary string
	cmd    *exec.Cmd
	stderr bytes.Buffer
	dir    string // it works in; empty: the test's
	key    string // file that credd gets open, as the supervisor would hand it over; empty: none
}

func newWorld(t *testing.T) *world {
	testroot.Require(t)
	w := &world{t: t, binary: filepath.Join(t.TempDir(), "credd")}
	// The testing package keeps these directories to the user who tests; credd runs as another one.
	if err := os.Chmod(filepath.Dir(filepath.Dir(w.binary)), 0o755); err != nil { // holds a public binary
		t.Fatal(err)
	}
	build := exec.Command("go", "build", "-o", w.binary, ".") // our own package
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building credd: %v\n%s", err, out)
	}
	var err error
	if w.inst, err = instance.Claim(testInstance); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(os.RemoveAll(w.inst.RunDir()), os.RemoveAll(w.inst.StateDir()), w.inst.Release()); err != nil {
			t.Error(err)
		}
	})
	w.makeDirs()
	w.serveTags()
	return w
}

func (w *world) makeDirs() {
	w.t.Helper()
	uid, gid := w.inst.UID(instance.Credd), w.inst.GroupID()
	own := []string{filepath.Dir(w.inst.Socket(instance.Credd)), w.inst.CreddDir(), filepath.Dir(w.inst.AuditFile(instance.Credd))}
	for _, dir := range append(own, filepath.Dir(w.inst.Socket(instance.Killswitchd))) {
		if err := os.MkdirAll(dir, 0o755); err != nil { // a test's own instance
			w.t.Fatal(err)
		}
	}
	for _, dir := range own {
		if err := errors.Join(os.Chown(dir, uid, gid), os.Chmod(dir, 0o750)); err != nil { // as tagout setup does
			w.t.Fatal(err)
		}
	}
	if err := os.Chmod(w.inst.CreddDir(), 0o700); err != nil { // a directory
		w.t.Fatal(err)
	}
	raw, err := (&config.Box{Resolvers: []netip.AddrPort{netip.MustParseAddrPort("203.0.113.2:53")}}).Marshal()
	if err == nil {
		err = os.WriteFile(w.inst.BoxConfig(), raw, 0o644) // not secret
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) serveTags() {
	w.t.Helper()
	l, err := control.Listen(w.inst.Socket(instance.Killswitchd), w.inst.GroupID())
	if err != nil {
		w.t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/tags", func(rw http.ResponseWriter, _ *http.Request) { control.Reply(rw, []wire.Tag{}) })
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); control.Serve(ctx, l, mux, time.Second) }() // ends with the test
	w.t.Cleanup(func() { cancel(); <-done })
}

// start runs credd with its own uid and the one capability that it may have, and waits until it is healthy.
func (w *world) start() {
	w.t.Helper()
	w.startUnseen()
	w.healthy()
}

// startUnseen is start without the wait.
func (w *world) startUnseen() {
	w.t.Helper()
	w.cmd = exec.Command(w.binary, "--instance", testInstance) // built above
	w.cmd.Stderr, w.cmd.Dir = &w.stderr, w.dir
	if w.key != "" {
		f, err := os.Open(w.key)
		if err != nil {
			w.t.Fatal(err)
		}
		defer f.Close() // the child has its own copy
		w.cmd.ExtraFiles, w.cmd.Env = []*os.File{f}, append(os.Environ(), instance.UnlockEnv+"=3")
	}
	w.cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential:  &syscall.Credential{Uid: uint32(w.inst.UID(instance.Credd)), Gid: uint32(w.inst.GroupID())}, // not negative
		AmbientCaps: []uintptr{unix.CAP_IPC_LOCK},
		Pdeathsig:   syscall.SIGKILL,
	}
	if err := w.cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(w.kill)
}

func (w *world) healthy() {
	w.t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for w.call("GET", "/healthz", nil, nil) != nil {
		if time.Now().After(deadline) {
			w.t.Fatalf("credd is not healthy: %s", w.stderr.String())
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (w *world) kill() {
	w.cmd.Process.Kill() // may be dead already
	w.cmd.Wait()         // killed
}

func (w *world) call(method, route string, in, out any) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	c := control.NewClient(w.inst.Socket(instance.Credd))
	defer c.CloseIdle()
	return c.Call(ctx, method, route, in, out)
}

// asProxy makes the call with the proxy's credentials.
func (w *world) asProxy(in wire.ResolveRequest) (out wire.ResolveReply, err error) {
	err = w.onProxysThread(func(socket string) error { return callHere(socket, in, &out) })
	return out, err
}

// onProxysThread calls fn on a thread with the proxy's credentials: the kernel takes them from the thread that connects.
func (w *world) onProxysThread(fn func(socket string) error) (err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never given back: the thread ends with the goroutine
		gid, uid := uintptr(w.inst.GroupID()), uintptr(w.inst.UID(instance.Proxy))
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, gid, gid, gid); e != 0 {
			err = e
			return
		}
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid); e != 0 {
			err = e
			return
		}
		err = fn(w.inst.Socket(instance.Credd))
	}()
	<-done
	return err
}

func (w *world) mint(mark uint32) string {
	w.t.Helper()
	var reply wire.MintReply
	req := wire.MintRequest{Kid: "kid1", Session: "01S" + hex.EncodeToString([]byte{byte(mark)}), Card: "c", Mark: mark, Secrets: []wire.MintSecret{{Name: "vendor_api"}}} // a small number
	if err := w.call("POST", "/v1/sessions", req, &reply); err != nil {
		w.t.Fatal(err)
	}
	return reply.Tokens["vendor_api"]
}

// TestKilledCreddFailsClosed runs the real binary as its own user: a kill -9 revokes every token, keeps the
// vault, and leaves no secret on any disk.
func TestKilledCreddFailsClosed(t *testing.T) {
	w := newWorld(t)
	w.start()
	if err := w.call("PUT", "/v1/vault/vendor_api", wire.VaultEntry{Value: testValue, Hosts: []string{"api.vendor.test:443"}}, nil); err != nil {
		t.Fatal(err)
	}
	mark := w.inst.SessionMark(1)
	token := w.mint(mark)
	use := wire.ResolveRequest{Mark: mark, Token: token, Host: "api.vendor.test", Port: 443}
	if got, err := w.asProxy(use); err != nil || got.Value != testValue {
		t.Fatalf("resolving: %+v, %v", got, err)
	}
	if err := w.call("POST", "/v1/resolve", use, nil); control.Status(err) != 403 {
		t.Errorf("root resolved a token: %v", err)
	}
	w.checkProcess()
	if err := w.call("POST", "/v1/revoke", wire.RevokeRequest{Marks: []uint32{w.inst.SessionMark(9)}}, nil); err != nil {
		t.Fatal(err)
	}
	w.kill()
	if _, err := w.asProxy(use); err == nil {
		t.Error("a dead credd resolved a token")
	}
	w.start()
	if _, err := w.asProxy(use); control.Status(err) != 403 {
		t.Errorf("a token outlived a kill -9: %v", err)
	}
	use.Mark = w.inst.SessionMark(2)
	use.Token = w.mint(use.Mark)
	if got, err := w.asProxy(use); err != nil || got.Value != testValue {
		t.Errorf("resolving after a restart: %+v, %v", got, err)
	}
	w.noSecretLeft(testValue, token, use.Token)
}

// checkProcess looks at what the kernel says of the process: its memory is locked and not for others.
func (w *world) checkProcess() {
	w.t.Helper()
	raw, err := os.ReadFile(filepath.Join("/proc", itoa(w.cmd.Process.Pid), "status"))
	if err != nil {
		w.t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		if v, ok := strings.CutPrefix(line, "VmLck:"); ok && strings.Fields(v)[0] == "0" {
			w.t.Error("no memory is locked")
		}
	}
	var st unix.Stat_t
	// A process that is not dumpable has its /proc files owned by root (proc(5)).
	if err := unix.Stat(filepath.Join("/proc", itoa(w.cmd.Process.Pid), "mem"), &st); err != nil || st.Uid != 0 {
		w.t.Errorf("memory file belongs to uid %d, %v: the process can be dumped", st.Uid, err)
	}
}

// noSecretLeft looks for the values in every file of the instance and in what credd printed.
func (w *world) noSecretLeft(values ...string) {
	w.t.Helper()
	files := 0
	look := func(name string, raw []byte) {
		for _, v := range values {
			for _, form := range []string{v, hex.EncodeToString([]byte(v)), base64.RawStdEncoding.EncodeToString([]byte(v))[:len(v)]} {
				if bytes.Contains(raw, []byte(form)) {
					w.t.Errorf("%s holds a secret or a token", name)
				}
			}
		}
	}
	for _, root := range []string{w.inst.StateDir(), w.inst.RunDir()} {
		err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
			if err != nil || !e.Type().IsRegular() {
				return err
			}
			files++
			raw, err := os.ReadFile(path) // the test's own files
			look(path, raw)
			return err
		})
		if err != nil {
			w.t.Fatal(err)
		}
	}
	look("standard error", w.stderr.Bytes())
	if files < 5 {
		w.t.Errorf("only %d files were looked at", files)
	}
}
