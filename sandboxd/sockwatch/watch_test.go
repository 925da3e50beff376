package sockwatch

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

const goodState = `{"ociVersion":"1.0.2","fds":["seccompFd"],"pid":7,"metadata":"7001000a","state":{"id":"k1"}}`

// send does what runc does, with so many descriptors of a pipe.
func send(t *testing.T, state string, fds int) (*net.UnixConn, *os.File) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s")})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.DialUnix("unix", nil, l.Addr().(*net.UnixAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	server, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	var oob []byte
	if fds > 0 {
		all := make([]int, fds)
		for i := range all {
			all[i] = int(w.Fd())
		}
		oob = unix.UnixRights(all...)
	}
	if _, _, err := client.WriteMsgUnix([]byte(state), oob, nil); err != nil {
		t.Fatal(err)
	}
	return server, r
}

// ended says whether nobody has the pipe's other end any more.
func ended(t *testing.T, r *os.File) bool {
	t.Helper()
	fds := []unix.PollFd{{Fd: int32(r.Fd()), Events: unix.POLLIN}}
	if _, err := unix.Poll(fds, 0); err != nil {
		t.Fatal(err)
	}
	return fds[0].Revents&unix.POLLHUP != 0
}

func TestReceiveTakesOneFilter(t *testing.T) {
	conn, r := send(t, goodState, 1)
	defer r.Close()
	mark, file, err := receive(conn)
	if err != nil || mark != 0x7001000a || Metadata(mark) != "7001000a" {
		t.Fatalf("mark %x, %v", mark, err)
	}
	if ended(t, r) {
		t.Error("the filter is closed")
	}
	if flags, err := unix.FcntlInt(file.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("commands of sandboxd inherit the filter: %v", err)
	}
	file.Close()
	if !ended(t, r) {
		t.Error("somebody still has the filter")
	}
}

// TestWhatIsNoFilterIsLetGo: with a descriptor kept open the kernel would wait for an answer.
func TestWhatIsNoFilterIsLetGo(t *testing.T) {
	for name, c := range map[string]struct {
		state string
		fds   int
	}{
		"no descriptor": {goodState, 0}, "two": {goodState, 2}, "no JSON": {"{", 1}, "empty": {"{}", 1},
		"another name": {`{"fds":["other"],"metadata":"7"}`, 1}, "no mark": {`{"fds":["seccompFd"],"metadata":""}`, 1},
		"a long mark": {`{"fds":["seccompFd"],"metadata":"123456789"}`, 1},
	} {
		conn, r := send(t, c.state, c.fds)
		if _, _, err := receive(conn); err == nil {
			t.Errorf("%s: no error", name)
		}
		if !ended(t, r) {
			t.Errorf("%s: the descriptor is kept", name)
		}
		r.Close()
	}
}

func TestProcessOfAThread(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if p := processOf(unix.Gettid()); p.pid != os.Getpid() || p.exe != self || p.comm == "" {
		t.Errorf("%+v", p)
	}
}

func TestOnlyMultipathTCPIsUnsupported(t *testing.T) {
	for c, want := range map[call]unix.Errno{
		{"socket", unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP}: unix.EPROTONOSUPPORT,
		{"socket", unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP}:  unix.EPERM,
		{"socket", unix.AF_ALG, unix.SOCK_STREAM, unix.IPPROTO_MPTCP}:  unix.EPERM,
		{"socketpair", unix.AF_TIPC, unix.SOCK_DGRAM, 0}:               unix.EPERM,
	} {
		if got := c.errno(); got != want {
			t.Errorf("%+v: %v, want %v", c, got, want)
		}
	}
}
