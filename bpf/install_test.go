package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"tagout/internal/testroot"
)

// attachedIDs returns every program at a cgroup or link, ours or not.
func attachedIDs(t testing.TB, target int, hooks []hook) map[string][]ebpf.ProgramID {
	t.Helper()
	out := map[string][]ebpf.ProgramID{}
	for _, h := range hooks {
		res, err := link.QueryPrograms(link.QueryOptions{Target: target, Attach: h.attach})
		must(t, err)
		for _, p := range res.Programs {
			out[h.program] = append(out[h.program], p.ID)
		}
	}
	return out
}

func cgroupIDs(t testing.TB, dir string, hooks []hook) map[string][]ebpf.ProgramID {
	t.Helper()
	f, err := os.Open(dir)
	must(t, err)
	defer f.Close()
	return attachedIDs(t, int(f.Fd()), hooks)
}

func oneEach(t *testing.T, what string, got map[string][]ebpf.ProgramID, hooks []hook) {
	t.Helper()
	for _, h := range hooks {
		if len(got[h.program]) != 1 {
			t.Errorf("%s: %d programs for %s, want 1", what, len(got[h.program]), h.program)
		}
	}
}

// A second installation exchanges every program, also on links, and keeps what the maps hold.
func TestInstallTwice(t *testing.T) {
	bothWays(t, func(t *testing.T) {
		s, m := installed(t, "tbpfd")
		w := newWorld(t)
		must(t, m.AttachLink(w.link))
		must(t, m.AttachLink(w.link)) // idempotent
		must(t, m.PutKid(0, w.link, tMark))
		echoTCP(t, at(tName, tPort))
		kid := w.start(t, s.kid)
		fd, errno := kid.dial(v4, stream, at(tName, tPort))
		if errno != 0 {
			t.Fatal(errno)
		}
		before := cgroupIDs(t, s.cfg.KidsCgroup, kidHooks)
		linkBefore := linkIDs(t, w.link)
		must(t, Install(s.cfg))
		after := cgroupIDs(t, s.cfg.KidsCgroup, kidHooks)
		linkAfter := linkIDs(t, w.link)
		oneEach(t, "kids", after, kidHooks)
		oneEach(t, "daemon", cgroupIDs(t, s.daemon, daemonHooks), daemonHooks)
		oneEach(t, "link", linkAfter, linkHooks)
		for _, h := range kidHooks {
			if before[h.program][0] == after[h.program][0] {
				t.Errorf("%s was not exchanged", h.program)
			}
		}
		if linkBefore[linkHooks[0].program][0] == linkAfter[linkHooks[0].program][0] {
			t.Error("the link's program was not exchanged")
		}
		if !kid.exchange(fd) {
			t.Error("the connection broke")
		}
		must(t, m.StopSession(tMark)) // through maps that were opened before
		if !kid.cut(fd) {
			t.Error("a stop through the older maps does not reach the newer programs")
		}
	})
}

// While programs are exchanged over and over, no denied call may slip through.
func TestInstallHasNoOpenMoment(t *testing.T) {
	s, _ := installed(t, "tbpfe")
	w := newWorld(t)
	echoTCP(t, at(tWorld, 443))
	kid := w.start(t, s.kid)
	done := make(chan error, 1)
	go func() {
		var err error
		for range 8 {
			err = errors.Join(err, Install(s.cfg))
		}
		done <- err
	}()
	tries := 0
	for {
		select {
		case err := <-done:
			must(t, err)
			if tries == 0 {
				t.Error("no call was made in the meantime")
			}
			return
		default:
		}
		tries++
		if errno := kid.attempt(v4, stream, false, at(tWorld, 443)); errno != unix.EPERM {
			t.Fatalf("try %d: %v", tries, errno)
		}
	}
}

// An emptied BPF filesystem opens nothing, and the next installation finds the maps again.
func TestInstallAfterThePinsAreGone(t *testing.T) {
	s, m := installed(t, "tbpff")
	must(t, os.RemoveAll(s.cfg.PinDir))
	kid := startHelper(t, s.kid)
	if errno := kid.attempt(v4, stream, false, at(tWorld, 443)); errno != unix.EPERM {
		t.Errorf("without pins: %v", errno)
	}
	must(t, m.StopSession(tMark)) // open maps still work
	if _, err := Open(s.cfg.PinDir); !errors.Is(err, ErrNotInstalled) {
		t.Errorf("opening: %v", err)
	}
	must(t, Install(s.cfg))
	again, err := Open(s.cfg.PinDir)
	must(t, err)
	defer again.Close()
	if e, err := again.Session(tMark); err != nil || e.State != StateStopped || e.Addr != tKid {
		t.Errorf("the stopped session became %+v, %v", e, err)
	}
}

func TestUninstallLeavesNothing(t *testing.T) {
	bothWays(t, func(t *testing.T) {
		s, m := installed(t, "tbpfg")
		w := newWorld(t)
		must(t, m.AttachLink(w.link))
		must(t, m.PutKid(0, w.link, tMark))
		for range 2 {
			must(t, Uninstall(s.cfg.PinDir, s.cfg.KidsCgroup, s.cfg.DaemonCgroups))
			if _, err := os.Stat(s.cfg.PinDir); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("pin directory: %v", err)
			}
			all := append(append([]hook{}, kidHooks...), daemonHooks...)
			for what, got := range map[string]map[string][]ebpf.ProgramID{
				"kids": cgroupIDs(t, s.cfg.KidsCgroup, all), "daemon": cgroupIDs(t, s.daemon, all), "link": linkIDs(t, w.link),
			} {
				if len(got) != 0 {
					t.Errorf("%s: still attached: %v", what, got)
				}
			}
		}
		must(t, Uninstall("/sys/fs/bpf/tagout/tbpfnone", "/sys/fs/cgroup/none", nil))
	})
}

// Uninstall finds links also when the pins are gone.
func TestUninstallWithoutPins(t *testing.T) {
	bothWays(t, func(t *testing.T) {
		s, m := installed(t, "tbpfh")
		w := newWorld(t)
		must(t, m.AttachLink(w.link))
		must(t, m.PutKid(0, w.link, tMark))
		must(t, os.RemoveAll(s.cfg.PinDir))
		must(t, Uninstall(s.cfg.PinDir, s.cfg.KidsCgroup, s.cfg.DaemonCgroups))
		if got := linkIDs(t, w.link); len(got) != 0 {
			t.Errorf("still on the link: %v", got)
		}
	})
}

func TestOtherLayoutsAreRefused(t *testing.T) {
	s, m := installed(t, "tbpfi")
	before := cgroupIDs(t, s.cfg.KidsCgroup, kidHooks)
	other := tagoutLayoutInfo{Version: layoutVersion + 1}
	must(t, m.put(tagoutMapLayout, uint32(0), &other))
	if err := Install(s.cfg); !errors.Is(err, ErrLayout) {
		t.Errorf("installing over another layout: %v", err)
	}
	if _, err := Open(s.cfg.PinDir); !errors.Is(err, ErrLayout) {
		t.Errorf("opening another layout: %v", err)
	}
	after := cgroupIDs(t, s.cfg.KidsCgroup, kidHooks)
	for name, ids := range before {
		if len(after[name]) != 1 || after[name][0] != ids[0] {
			t.Errorf("%s was changed from %v to %v", name, ids, after[name])
		}
	}
}

// A map of another shape under our name is refused as well, and stays.
func TestForeignMapIsRefused(t *testing.T) {
	s := newSetup(t, "tbpfj")
	must(t, makePinDir(s.cfg.PinDir, 0))
	foreign, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	must(t, err)
	defer foreign.Close()
	must(t, foreign.Pin(filepath.Join(s.cfg.PinDir, tagoutMapSessions)))
	if err := Install(s.cfg); !errors.Is(err, ErrLayout) || !strings.Contains(err.Error(), "tagout cleanup") {
		t.Errorf("installing over a foreign map: %v", err)
	}
	if got := cgroupIDs(t, s.cfg.KidsCgroup, kidHooks); len(got) != 0 {
		t.Errorf("half installed: %v", got)
	}
}

func TestBadConfigurations(t *testing.T) {
	needBPFFS(t)
	good := Config{
		PinDir: "/sys/fs/bpf/tagout/tbpfk", KidsCgroup: "/nowhere", KidLevel: 3, Gateway: tGateway, KidNet: tKidNet,
		Virtual: tVirtual, BoxMark: 1,
	}
	for name, change := range map[string]func(*Config){
		"relative pins":       func(c *Config) { c.PinDir = "pins" },
		"level 0":             func(c *Config) { c.KidLevel = 0 },
		"gateway outside":     func(c *Config) { c.Gateway = tWorld },
		"virtual net of IPv6": func(c *Config) { c.Virtual = netip.MustParsePrefix("2001:db8::/64") },
		"no box mark":         func(c *Config) { c.BoxMark = 0 },
		"no bpf filesystem":   func(c *Config) { c.PinDir = filepath.Join(t.TempDir(), "pins") },
	} {
		cfg := good
		change(&cfg)
		if err := Install(cfg); err == nil {
			t.Errorf("%s was installed", name)
		}
	}
	if _, err := os.Stat(good.PinDir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("something was left: %v", err)
	}
}

// systemd mounts the BPF filesystem for root alone; the daemons must get through to their pins all the same.
func TestPinDirBelowAClosedMount(t *testing.T) {
	testroot.Require(t)
	mnt := t.TempDir()
	must(t, unix.Mount("bpf", mnt, "bpf", 0, "mode=0700"))
	t.Cleanup(func() { must(t, unix.Unmount(mnt, 0)) })
	dir := filepath.Join(mnt, "tagout", "x")
	must(t, makePinDir(dir, 4711))
	for path, want := range map[string]fs.FileMode{mnt: 0o711, filepath.Dir(dir): 0o755, dir: 0o750} {
		info, err := os.Stat(path)
		must(t, err)
		if got := info.Mode().Perm(); got != want {
			t.Errorf("%s has mode %o, want %o", path, got, want)
		}
	}
}

// Who may open what: the instance's group reads, killswitchd writes stops, nobody but root sees events.
func TestPinOwners(t *testing.T) {
	s, _ := installed(t, "tbpfl")
	as := func(uid, gid int) string {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), pinsEnv+"="+s.cfg.PinDir)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("as %d/%d: %v\n%s", uid, gid, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	for _, c := range []struct {
		name     string
		uid, gid int
		want     string
	}{
		{"killswitchd", s.cfg.KillUID, s.cfg.GID, "read stop-session stop-all"},
		{"another daemon", s.cfg.KillUID + 1, s.cfg.GID, "read"},
		{"a stranger", 65534, 65534, "nothing"},
	} {
		if got := as(c.uid, c.gid); got != c.want {
			t.Errorf("%s may %q, want %q", c.name, got, c.want)
		}
	}
}

const pinsEnv = "TAGOUT_BPF_TEST_PINS"

// pinsMain is the other half of TestPinOwners, run as another user: it prints what it may do.
func pinsMain(dir string) {
	m, err := Open(dir)
	if err != nil {
		fmt.Print("nothing")
		return
	}
	_, readErr := m.Counters(0)
	_, eventsErr := m.table(tagoutMapEvents)
	for _, c := range []struct {
		word string
		err  error
	}{
		{"read", readErr}, {"stop-session", m.StopSession(tMark)}, {"stop-all", m.StopAll(true)},
		{"put-port", m.AllowPort(tMark, tcp, 22)}, {"put-kid", m.PutKid(1, 1, tMark)},
		{"put-counters", m.put(tagoutMapCounters, uint32(0), &tagoutTally{})}, {"attach", m.AttachLink(1)}, {"events", eventsErr},
	} {
		if c.err == nil {
			fmt.Print(c.word + " ")
		}
	}
}

func TestClock(t *testing.T) {
	a := bootNow()
	if b := bootNow(); a < 2 || b < a || b-a > uint64(time.Second) {
		t.Errorf("boot clock went from %d to %d", a, b)
	}
}
