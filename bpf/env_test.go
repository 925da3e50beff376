package bpf

import (
	"bufio"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"tagout/internal/testroot"
)

// The network of the tests: everything lies in network namespaces of its own.
var (
	tGateway = netip.MustParseAddr("198.19.240.1")
	tHost    = netip.MustParseAddr("198.19.240.2") // host end of the kid's /31
	tKid     = netip.MustParseAddr("198.19.240.3")
	tKidNet  = netip.MustParsePrefix("198.19.240.0/20")
	tVirtual = netip.MustParsePrefix("198.18.240.0/20")
	tName    = netip.MustParseAddr("198.18.240.7")  // a virtual address
	tWorld   = netip.MustParseAddr("203.0.113.250") // somewhere on the internet
)

const (
	tMark    = 0x54f00007
	tBoxMark = 0x54f00000
	tPort    = 443 // the port that the test session may use
)

func sortedMaps(spec *ebpf.CollectionSpec) []string {
	var out []string
	for name := range spec.Maps {
		if isOurMap(name) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually waits until ok, and fails with what after some seconds.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(5 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
		time.Sleep(time.Millisecond) // between two looks at the condition
	}
}

// needBPFFS mounts the BPF filesystem where it is missing; it stays, as on any machine that runs Tagout.
func needBPFFS(t testing.TB) {
	t.Helper()
	testroot.Require(t)
	if onBPFFS("/sys/fs/bpf") {
		return
	}
	if err := unix.Mount("bpf", "/sys/fs/bpf", "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0711"); err != nil {
		t.Fatalf("mounting the BPF filesystem: %v", err)
	}
}

// cgroup2Root finds the v2 hierarchy, unified or hybrid.
func cgroup2Root(t testing.TB) string {
	t.Helper()
	f, err := os.Open("/proc/self/mountinfo")
	must(t, err)
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		left, right, ok := strings.Cut(sc.Text(), " - ")
		if ok && strings.HasPrefix(right, "cgroup2 ") {
			return strings.Fields(left)[4]
		}
	}
	t.Fatal("no cgroup v2 hierarchy is mounted")
	return ""
}

// makeCgroup makes a cgroup and removes it at the end, when its processes are gone.
func makeCgroup(t testing.TB, rel string) string {
	t.Helper()
	dir := filepath.Join(cgroup2Root(t), rel)
	must(t, os.Mkdir(dir, 0o755))
	t.Cleanup(func() {
		eventually(t, "removing "+dir, func() bool {
			err := unix.Rmdir(dir)
			return err == nil || errors.Is(err, fs.ErrNotExist)
		})
	})
	return dir
}

func cgroupID(t testing.TB, dir string) uint64 {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(dir, &st))
	return st.Ino
}

// setup is one installation of the tests.
type setup struct {
	cfg    Config
	kid    string // the kid's cgroup
	daemon string
}

// newSetup makes cgroups and a configuration, and removes what Install may have made.
func newSetup(t testing.TB, name string) *setup {
	t.Helper()
	needBPFFS(t)
	top := "tagout." + name
	makeCgroup(t, top)
	kids := makeCgroup(t, top+"/kids")
	makeCgroup(t, top+"/daemons")
	s := &setup{kid: makeCgroup(t, top+"/kids/k1"), daemon: makeCgroup(t, top+"/daemons/proxy")}
	s.cfg = Config{
		PinDir: "/sys/fs/bpf/tagout/" + name, KidsCgroup: kids, DaemonCgroups: []string{s.daemon}, KidLevel: 3,
		Gateway: tGateway, KidNet: tKidNet, Virtual: tVirtual, BoxMark: tBoxMark, GID: 0x6fff00f0, KillUID: 0x6fff00f4,
	}
	t.Cleanup(func() { must(t, Uninstall(s.cfg.PinDir, s.cfg.KidsCgroup, s.cfg.DaemonCgroups)) })
	return s
}

// installed also installs, opens the maps and adds an active session with one port.
func installed(t testing.TB, name string) (*setup, *Maps) {
	t.Helper()
	s := newSetup(t, name)
	must(t, Install(s.cfg))
	m, err := Open(s.cfg.PinDir)
	must(t, err)
	t.Cleanup(func() { m.Close() })
	s.addSession(t, m)
	return s, m
}

func (s *setup) addSession(t testing.TB, m *Maps) {
	t.Helper()
	must(t, m.PutSession(tMark, SessionEntry{State: StateActive, Addr: tKid}))
	must(t, m.GrantLease(tMark, soonOver()))
	must(t, m.PutKid(cgroupID(t, s.kid), 0, tMark))
	must(t, m.AllowPort(tMark, unix.IPPROTO_TCP, tPort))
}
