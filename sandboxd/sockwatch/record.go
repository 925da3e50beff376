package sockwatch

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

// call is what a process asked for: the arguments of socket(2) or socketpair(2), as the kernel takes them.
type call struct {
	name                string
	family, kind, proto int32
}

const kindMask = 0xf // SOCK_TYPE_MASK: what is above are flags

func callOf(n notification) call {
	c := call{name: "system call " + strconv.Itoa(int(n.nr)), family: int32(n.args[0]), kind: int32(n.args[1]) & kindMask, proto: int32(n.args[2])}
	switch n.nr {
	case unix.SYS_SOCKET:
		c.name = "socket"
	case unix.SYS_SOCKETPAIR:
		c.name = "socketpair"
	}
	return c
}

// errno is the error that the call gets. Programs that would like multipath TCP ask for it first and take TCP
// where a kernel does not have it.
func (c call) errno() unix.Errno {
	if c.proto == unix.IPPROTO_MPTCP && (c.family == unix.AF_INET || c.family == unix.AF_INET6) {
		return unix.EPROTONOSUPPORT
	}
	return unix.EPERM
}

var families = map[int32]string{
	unix.AF_UNIX: "unix", unix.AF_INET: "ipv4", unix.AF_INET6: "ipv6", unix.AF_NETLINK: "netlink", unix.AF_PACKET: "packet",
	unix.AF_VSOCK: "vsock", unix.AF_ALG: "alg", unix.AF_BLUETOOTH: "bluetooth", unix.AF_CAN: "can", unix.AF_TIPC: "tipc", unix.AF_XDP: "xdp",
}

var kinds = map[int32]string{
	unix.SOCK_STREAM: "stream", unix.SOCK_DGRAM: "dgram", unix.SOCK_RAW: "raw", unix.SOCK_RDM: "rdm", unix.SOCK_SEQPACKET: "seqpacket",
}

// named returns the number's name, or the number.
func named(names map[int32]string, n int32) string {
	if name, ok := names[n]; ok {
		return name
	}
	return strconv.Itoa(int(n))
}

// process is who called. Its path is as it is called inside its kid; what could not be read is empty.
type process struct {
	pid  int // in this process's pid namespace
	comm string
	exe  string
}

// processOf looks up a thread's process.
func processOf(tid int) process {
	dir := "/proc/" + strconv.Itoa(tid)
	p := process{pid: tid}
	p.exe, _ = os.Readlink(dir + "/exe")
	f, err := os.Open(dir + "/status")
	if err != nil {
		return p
	}
	defer f.Close() // only read
	for lines := bufio.NewScanner(f); lines.Scan(); {
		key, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimSpace(value)
		switch key {
		case "Name":
			p.comm = value
		case "Tgid":
			if pid, err := strconv.Atoi(value); err == nil {
				p.pid = pid
			}
			return p
		}
	}
	return p
}

// note records one refusal. Repeats within a second are counted in one record.
func (w *Watch) note(mark uint32, who process, c call) {
	w.cfg.Metrics.Denied(reason.RawSocket, 1)
	w.tally.Add(Metadata(mark), fmt.Sprint(who.pid, c), func() audit.Record { return w.record(mark, who, c) })
}

func (w *Watch) record(mark uint32, who process, c call) audit.Record {
	rec := audit.Record{
		Event: audit.EventConnectDenied, Mark: mark, Outcome: audit.OutcomeDeny, Reason: reason.RawSocket, Actor: "kid",
		Process: &audit.Process{PID: who.pid, Comm: who.comm, Exe: who.exe},
		Fields: map[string]string{
			"hook": Hook, "call": c.name, "family": named(families, c.family), "type": named(kinds, c.kind), "protocol": strconv.Itoa(int(c.proto)),
		},
	}
	rec.Kid, rec.Session, rec.Card, _ = w.cfg.Sessions.SessionOf(mark)
	return rec
}
