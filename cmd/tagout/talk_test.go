package main

import (
	"bytes"
	"crypto/sha1"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/control"
	"tagout/internal/execsocket"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/testpty"
	"tagout/internal/wire"
)

// talker is a sandboxd whose commands are functions, called by the kid's name.
type talker map[string]func(s *execsocket.Server, r wire.ExecRequest)

func (k talker) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s, ok := execsocket.Accept(w, r, execsocket.Config{Origin: execsocket.SameOrigin})
	if !ok {
		return
	}
	var req wire.ExecRequest
	if err := s.First(&req, control.MaxBody); err != nil {
		s.End(nil)
		return
	}
	k[r.PathValue("kid")](s, req)
}

func serveTalk(t *testing.T, name string, mux *http.ServeMux, kids talker) {
	t.Helper()
	mux.Handle("GET /v1/kids/{kid}/exec", kids)
	serve(t, name, instance.Sandboxd, mux)
}

// cut is an end that nobody announces: the connection is gone.
func cut(w http.ResponseWriter) {
	conn, _, err := w.(http.Hijacker).Hijack()
	if err == nil {
		conn.Close()
	}
}

// began sends the frame that makes the caller begin.
func began(s *execsocket.Server) { s.Send(wire.ExecFrame{ID: "01x"}) }

func exited(s *execsocket.Server, e wire.ExecExit) {
	s.Send(wire.ExecFrame{Exit: &e})
	s.End(nil)
}

// echo gives back what is typed, and ends with 7 at its end or at a q.
func echo(s *execsocket.Server, _ wire.ExecRequest) {
	s.Follow(func(z wire.TermSize) {}, func() { s.End(nil) })
	began(s)
	for {
		select {
		case in := <-s.Input():
			if s.Send(wire.ExecFrame{Stdout: in.Stdin}); in.EOF || bytes.ContainsRune(in.Stdin, 'q') {
				exited(s, wire.ExecExit{Result: "exited", Code: 7})
				return
			}
		case <-s.Context().Done():
			s.End(nil)
			return
		}
	}
}

// deaf reads nothing that it is sent, and says nothing.
func deaf(until <-chan struct{}) func(*execsocket.Server, wire.ExecRequest) {
	return func(s *execsocket.Server, _ wire.ExecRequest) {
		began(s)
		<-until
		s.End(nil)
	}
}

func typing(t *testing.T, name, kid string, args ...string) *testpty.Session {
	t.Helper()
	return testpty.Start(t, exec.Command("tagout", append([]string{"exec", "--instance", name, kid, "-t"}, args...)...), 30, 100)
}

// TestTheTerminalIsGivenBack: whatever ends the command, or us, the terminal is as it was, and the end is told on a line
// of its own.
func TestTheTerminalIsGivenBack(t *testing.T) {
	over := make(chan struct{})
	t.Cleanup(func() { close(over) })
	serveTalk(t, "tclit1", http.NewServeMux(), talker{
		"echo": echo,
		"hang": deaf(over),
		"stopped": func(s *execsocket.Server, _ wire.ExecRequest) {
			began(s)
			s.Send(wire.ExecFrame{Stdout: []byte("half a li")})
			exited(s, wire.ExecExit{Result: "stopped", Code: 137, Detail: "ada: odd uploads"})
		},
		"signaled": func(s *execsocket.Server, _ wire.ExecRequest) {
			began(s)
			exited(s, wire.ExecExit{Result: "signaled", Code: 143, Signal: "SIGTERM"})
		},
		"ended": func(s *execsocket.Server, _ wire.ExecRequest) {
			s.Follow(func(wire.TermSize) {}, func() {})
			began(s)
			s.End(nil)
		},
		"refused": func(s *execsocket.Server, _ wire.ExecRequest) {
			s.End(&wire.Problem{Title: "Locked", Status: http.StatusLocked, Reason: reason.Tagged, Detail: "tag 01X hangs here"})
		},
		"left": func(s *execsocket.Server, _ wire.ExecRequest) {
			began(s)
			s.End(&wire.Problem{Title: "Unavailable", Status: http.StatusServiceUnavailable, Reason: reason.Internal, Detail: "sandboxd ends: try again when it is back"})
		},
	})
	type end func(s *testpty.Session)
	sig := func(n unix.Signal) end { return func(s *testpty.Session) { s.WaitRaw(); s.Signal(n) } }
	for name, tt := range map[string]struct {
		kid  string
		end  end
		code int
		last string
	}{
		"a key":           {"echo", func(s *testpty.Session) { s.WaitRaw(); s.Type("abq"); s.Wait("abq") }, 7, "abq"},
		"ctrl-c is a key": {"echo", func(s *testpty.Session) { s.WaitRaw(); s.Type("\x03\x1a\x1c"); s.Wait("\x03\x1a\x1c"); s.Type("q") }, 7, "q"},
		"left":            {"echo", func(s *testpty.Session) { s.WaitRaw(); s.Type("\x1dd") }, 0, "\ntagout: the command goes on: `tagout attach --instance tclit1 echo 01x` goes back to it\r\n"},
		"SIGTERM":         {"hang", sig(unix.SIGTERM), 130, "\ntagout: interrupted\r\n"},
		"SIGINT":          {"hang", sig(unix.SIGINT), 130, "\ntagout: interrupted\r\n"},
		"SIGHUP":          {"hang", sig(unix.SIGHUP), 130, "\ntagout: interrupted\r\n"},
		"SIGQUIT":         {"hang", sig(unix.SIGQUIT), 130, "\ntagout: interrupted: quit\r\n"},
		"SIGUSR1":         {"hang", sig(unix.SIGUSR1), 130, "\ntagout: interrupted: user defined signal 1\r\n"},
		"a stop":          {"stopped", nil, 3, "half a li\r\ntagout: the kid was stopped: ada: odd uploads: see `tagout tags`\r\n"},
		"a signal":        {"signaled", nil, 143, "\ntagout: the command was ended by SIGTERM\r\n"},
		"a lost server":   {"ended", nil, 1, "\ntagout: the connection to sandboxd ended before the command did: see `tagout list`\r\n"},
		"a refusal":       {"refused", nil, 3, "tagout: tag 01X hangs here\r\n"},
		"sandboxd's end":  {"left", nil, 4, "\ntagout: sandboxd ends: try again when it is back\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			s := typing(t, "tclit1", tt.kid, "--", "sh")
			if tt.end != nil {
				tt.end(s)
			}
			if code := s.End(); code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			s.Until("the last words are there", func() bool { return strings.HasSuffix(s.Screen(), tt.last) })
			cooked(t, s)
		})
	}
}

// cooked wants a terminal as every session here had it at first.
func cooked(t *testing.T, s *testpty.Session) {
	t.Helper()
	m := s.Modes()
	if m.Lflag&unix.ICANON == 0 || m.Lflag&unix.ECHO == 0 || m.Lflag&unix.ISIG == 0 || m.Oflag&unix.OPOST == 0 || m.Iflag&unix.ICRNL == 0 {
		t.Errorf("the terminal is left as %+v", m)
	}
}

// TestAKilledCallerCannotGiveTheTerminalBack is what the test above would see if nothing was given back.
func TestAKilledCallerCannotGiveTheTerminalBack(t *testing.T) {
	serveTalk(t, "tclit2", http.NewServeMux(), talker{"echo": echo})
	s := typing(t, "tclit2", "echo", "--", "sh")
	s.WaitRaw()
	s.Signal(unix.SIGKILL)
	s.End()
	s.WaitRaw()
}

// TestAHungSandboxdCanBeLeft, with more typed than anybody takes.
func TestAHungSandboxdCanBeLeft(t *testing.T) {
	over := make(chan struct{})
	t.Cleanup(func() { close(over) })
	serveTalk(t, "tclit3", http.NewServeMux(), talker{"hang": deaf(over)})
	s := typing(t, "tclit3", "hang", "--detach-keys", "ctrl-x", "--", "sh")
	s.WaitRaw()
	for range 100 {
		s.Type(strings.Repeat("x", 4000)) // more than the window
	}
	s.Type("\x18")
	if code := s.End(); code != 4 {
		t.Errorf("exit code %d", code)
	}
	s.Wait("sandboxd does not answer: whether the command goes on shows in `tagout execs`")
	cooked(t, s)
}

// TestWhatWasTypedBeforeLeavingArrives although leaving overtakes input.
func TestWhatWasTypedBeforeLeavingArrives(t *testing.T) {
	got := make(chan string, 1)
	serveTalk(t, "tclit4", http.NewServeMux(), talker{"slow": func(s *execsocket.Server, _ wire.ExecRequest) {
		var text strings.Builder
		left := make(chan struct{})
		s.Follow(func(wire.TermSize) {}, func() { close(left) })
		began(s)
		for {
			select { // the wish to leave first, as the worst order is
			case <-left:
				got <- text.String()
				s.End(nil)
				return
			default:
			}
			select {
			case in := <-s.Input():
				text.Write(in.Stdin)
			case <-left:
			}
		}
	}})
	s := typing(t, "tclit4", "slow", "--", "sh")
	s.WaitRaw()
	s.Type("make all\r\x1dd and what follows is nobody's")
	if text := <-got; text != "make all\r" {
		t.Errorf("the command got %q", text)
	}
	if code := s.End(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// TestTheSizeFollows the terminal, also while sandboxd is slow.
func TestTheSizeFollows(t *testing.T) {
	sizes := make(chan wire.TermSize, 16)
	serveTalk(t, "tclit5", http.NewServeMux(), talker{"sized": func(s *execsocket.Server, r wire.ExecRequest) {
		if r.Env["TERM"] != "tagout-test" {
			t.Errorf("environment %v", r.Env)
		}
		sizes <- *r.TTY
		s.Follow(func(z wire.TermSize) { sizes <- z }, func() {})
		began(s)
		<-s.Context().Done()
		s.End(nil)
	}})
	t.Setenv("TERM", "tagout-test")
	s := typing(t, "tclit5", "sized", "--", "sh")
	for _, want := range []wire.TermSize{{Rows: 30, Cols: 100}, {Rows: 30, Cols: 100}} { // with the request, and once it is ours
		if z := <-sizes; z != want {
			t.Errorf("at first %+v", z)
		}
	}
	for _, want := range []wire.TermSize{{Rows: 50, Cols: 132}, {Rows: 1, Cols: 1}, {Rows: 30, Cols: 65535}} {
		s.Resize(want.Rows, want.Cols)
		z := <-sizes
		for z != want { // one that was on its way
			z = <-sizes
		}
	}
	s.Signal(unix.SIGTERM)
	s.End()
}

// TestSuspendedAndContinued: whoever suspends us has the terminal as it was, and we have it again after.
func TestSuspendedAndContinued(t *testing.T) {
	serveTalk(t, "tclit6", http.NewServeMux(), talker{"echo": echo})
	s := typing(t, "tclit6", "echo", "--", "sh")
	s.WaitRaw()
	s.Signal(unix.SIGTSTP)
	s.Until("it is suspended", func() bool {
		raw, err := os.ReadFile("/proc/" + strconv.Itoa(s.Pid()) + "/stat")
		return err == nil && strings.Contains(string(raw), ") T ")
	})
	cooked(t, s)
	s.Signal(unix.SIGCONT)
	s.WaitRaw()
	s.Type("q")
	if code := s.End(); code != 7 {
		t.Errorf("exit code %d", code)
	}
	cooked(t, s)
}

// TestAReaderWhoStalls neither keeps us from ending nor the terminal.
func TestAReaderWhoStalls(t *testing.T) {
	serveTalk(t, "tclit7", http.NewServeMux(), talker{"yes": func(s *execsocket.Server, _ wire.ExecRequest) {
		s.Follow(func(wire.TermSize) {}, func() {})
		began(s)
		for s.Send(wire.ExecFrame{Stdout: make([]byte, 32<<10)}) == nil {
		}
		s.End(nil)
	}})
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	defer in.Close()
	cmd := exec.Command("tagout", "exec", "--instance", "tclit7", "yes", "-t", "--", "yes")
	cmd.Stdout = in
	s := testpty.Start(t, cmd, 30, 100)
	s.Until("the pipe is full", func() bool {
		n, err := unix.IoctlGetInt(int(out.Fd()), unix.TIOCINQ)
		return err == nil && n >= 1<<16
	})
	s.WaitRaw()
	s.Signal(unix.SIGTERM)
	if code := s.End(); code != 130 {
		t.Errorf("exit code %d", code)
	}
	cooked(t, s)
}

// upgraded makes the connection a WebSocket whose frames then sends as it likes; it ends with then.
func upgraded(t *testing.T, w http.ResponseWriter, r *http.Request, then func(c net.Conn)) {
	conn, rw, err := w.(http.Hijacker).Hijack()
	if err != nil {
		t.Error(err)
		return
	}
	defer conn.Close()
	sum := sha1.Sum([]byte(r.Header.Get("Sec-WebSocket-Key") + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11")) // RFC 6455, 1.3
	fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %s\r\nSec-WebSocket-Protocol: %s\r\n\r\n",
		base64.StdEncoding.EncodeToString(sum[:]), wire.ExecProtocol) // the test shows what comes of it
	rw.ReadByte() // the beginning of the request
	then(conn)
}

// frame sends one unmasked frame.
func frame(c net.Conn, op byte, body []byte) {
	head := append([]byte{0x80 | op, 127}, binary.BigEndian.AppendUint64(nil, uint64(len(body)))...)
	if len(body) < 126 {
		head = []byte{0x80 | op, byte(len(body))}
	}
	c.Write(append(head, body...)) // a reader that has gone shows elsewhere
}

// TestPeersThatAreNoSandboxd end the command with an error, and the terminal is given back.
func TestPeersThatAreNoSandboxd(t *testing.T) {
	id := []byte(`{"id":"01x"}`)
	for name, tt := range map[string]struct {
		then func(c net.Conn)
		want string
	}{
		"no JSON":          {func(c net.Conn) { frame(c, 1, id); frame(c, 1, []byte("hello")) }, "reading a frame: invalid character"},
		"too long":         {func(c net.Conn) { frame(c, 1, id); frame(c, 1, make([]byte, 1<<20+1)) }, "ended before the command did"},
		"cut in a message": {func(c net.Conn) { frame(c, 1, id); c.Write([]byte{0x81, 126, 1, 0, 'x'}) }, "ended before the command did"},
		"an unknown code":  {func(c net.Conn) { frame(c, 1, id); frame(c, 7, nil) }, "ended before the command did"},
		"two ids":          {func(c net.Conn) { frame(c, 1, id); frame(c, 1, id) }, "ended before the command did"},
	} {
		t.Run(name, func(t *testing.T) {
			mux := http.NewServeMux()
			mux.HandleFunc("GET /v1/kids/{kid}/exec", func(w http.ResponseWriter, r *http.Request) { upgraded(t, w, r, tt.then) })
			serve(t, "tclit8", instance.Sandboxd, mux)
			s := typing(t, "tclit8", "k", "--", "sh")
			if code := s.End(); code != 1 {
				t.Errorf("exit code %d", code)
			}
			s.Wait(tt.want)
			cooked(t, s)
		})
	}
	t.Run("cut at once", func(t *testing.T) {
		mux := http.NewServeMux()
		mux.HandleFunc("GET /v1/kids/{kid}/exec", func(w http.ResponseWriter, _ *http.Request) { cut(w) })
		serve(t, "tclit8", instance.Sandboxd, mux)
		s := typing(t, "tclit8", "k", "--", "sh")
		if code := s.End(); code != 4 {
			t.Errorf("exit code %d", code)
		}
		s.Wait("sandboxd ended before it answered")
	})
}

// TestInputEnds where standard input does, and not before; without -i there is none.
func TestInputEnds(t *testing.T) {
	requests := make(chan wire.ExecRequest, 1)
	serveTalk(t, "tclit9", http.NewServeMux(), talker{"cat": func(s *execsocket.Server, r wire.ExecRequest) {
		requests <- r
		echo(s, r)
	}})
	r, w := io.Pipe()
	var out bytes.Buffer
	done := make(chan int, 1)
	go func() {
		done <- run(t.Context(), []string{"--instance", "tclit9", "exec", "cat", "-i", "--env", "A=b=c", "--env", "E=", "-w", "/tmp", "--timeout", "3s", "--shell", "cat | cat"}, r, &out, io.Discard)
	}()
	if req := <-requests; !req.Input || req.TTY != nil || req.Shell != "cat | cat" || req.Dir != "/tmp" || req.Timeout != 3*time.Second || req.Env["A"] != "b=c" || len(req.Env) != 2 {
		t.Errorf("request %+v", req)
	}
	for _, piece := range []string{"a", "\x00\xff\x1dd\x03", "b"} {
		w.Write([]byte(piece)) // a reader that has gone shows below
	}
	w.Close()
	if code := <-done; code != 7 || out.String() != "a\x00\xff\x1dd\x03b" {
		t.Errorf("%d, %q", code, &out)
	}
}
