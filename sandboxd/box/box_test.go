package box

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/authority"
	"tagout/internal/cgroup"
	"tagout/internal/doctor"
	"tagout/internal/inspectca"
	"tagout/internal/instance"
	"tagout/internal/testroot"
)

// fakeBPF panics on a call that the test does not expect.
type fakeBPF struct {
	install, uninstall func(instance.Instance, string, []string) error
}

func (f fakeBPF) Install(i instance.Instance, kids string, daemons []string) error {
	return f.install(i, kids, daemons)
}

func (f fakeBPF) Uninstall(i instance.Instance, kids string, daemons []string) error {
	return f.uninstall(i, kids, daemons)
}

type rawConfig string

func (c rawConfig) Marshal() ([]byte, error) { return []byte(c), nil }
func (rawConfig) People() []authority.Person { return nil }

func (c rawConfig) Compiled() (map[string][]byte, error) {
	return map[string][]byte{instance.ProofFile: []byte("{}\n")}, nil
}

func healthy(context.Context) doctor.Report { return doctor.Report{OK: true} }

// boxes returns a Boxes for the test, which removes the instance at its end.
func boxes(t *testing.T, name string) Boxes {
	t.Helper()
	testroot.Require(t)
	b := Boxes{BPF: KernelBPF{}, Doctor: healthy}
	remove := func() {
		if err := b.Cleanup(context.Background(), name, true); err != nil {
			t.Errorf("cleaning up: %v", err)
		}
	}
	remove() // what a test that was killed has left
	t.Cleanup(remove)
	return b
}

func setup(t *testing.T, b Boxes, name string) instance.Instance {
	t.Helper()
	i, err := b.Setup(context.Background(), name, rawConfig("version: 1\n"))
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func layout(t *testing.T) cgroup.Layout {
	t.Helper()
	l, err := cgroup.Detect()
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func stat(t *testing.T, path string) (mode os.FileMode, uid, gid int) {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	st := info.Sys().(*syscall.Stat_t)
	return info.Mode().Perm(), int(st.Uid), int(st.Gid)
}

func read(t *testing.T, path string) string {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func save(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("sh", "-c", "iptables-save && ip6tables-save").Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func mustNone(t *testing.T, b Boxes, name string) {
	t.Helper()
	left, err := b.Leftovers(name, true)
	if err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
	if _, err := instance.Open(name); !errors.Is(err, instance.ErrUnknown) {
		t.Errorf("the slot is still taken: %v", err)
	}
}

func TestSetupGivesEachItsOwn(t *testing.T) {
	b := boxes(t, "tbox1")
	i := setup(t, b, "tbox1")
	gid := i.GroupID()
	uid := func(d string) int { return i.UID(d) }
	tests := []struct {
		path     string
		mode     os.FileMode
		uid, gid int
	}{
		{i.RunDir(), 0o755, 0, 0},
		{i.SessionDir(), 0o750, 0, gid},
		{filepath.Dir(i.Socket(instance.Credd)), 0o750, uid(instance.Credd), gid},
		{filepath.Dir(i.Socket(instance.Sandboxd)), 0o750, 0, gid},
		{i.NetNSDir(), 0o700, 0, 0},
		{i.RuncRoot(), 0o700, 0, 0},
		{i.DNSStateDir(), 0o700, uid(instance.DNSFilter), gid},
		{filepath.Dir(i.AuditFile(instance.Proxy)), 0o750, uid(instance.Proxy), gid},
		{i.TagDir(), 0o750, uid(instance.Killswitchd), gid},
		{i.StopDir(), 0o700, uid(instance.Killswitchd), gid},
		{i.CreddDir(), 0o700, uid(instance.Credd), gid},
		{i.CADir() + "/ca.pem", 0o644, 0, 0},
		{i.CADir() + "/ca.key.age", 0o400, uid(instance.Proxy), gid},
		{i.CADir() + "/ca.identity", 0o400, uid(instance.Proxy), gid},
		{i.BoxConfig(), 0o640, 0, gid},
		{filepath.Join(i.StateDir(), instance.ProofFile), 0o640, 0, gid},
		{layout(t).V2(i.KidsCgroupRel()) + "/cgroup.kill", 0o200, uid(instance.Killswitchd), gid},
		{layout(t).V2(i.KidsCgroupRel()) + "/cgroup.freeze", 0o644, uid(instance.Killswitchd), gid},
		{layout(t).V2(i.DaemonCgroupRel(instance.Credd)) + "/cgroup.kill", 0o200, uid(instance.Killswitchd), gid},
		{layout(t).V2(i.DaemonCgroupRel(instance.Proxy)) + "/cgroup.kill", 0o200, 0, 0},
	}
	for _, tt := range tests {
		mode, u, g := stat(t, tt.path)
		if mode != tt.mode || u != tt.uid || g != tt.gid {
			t.Errorf("%s: %v %d:%d, want %v %d:%d", tt.path, mode, u, g, tt.mode, tt.uid, tt.gid)
		}
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(i.StopDir(), &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		t.Errorf("a stop would wait for the disk: %s is on a filesystem of type %#x, %v", i.StopDir(), fs.Type, err)
	}
	for _, d := range kidDirs(i) {
		if err := unix.Statfs(d.path, &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
			t.Errorf("kids' files would be on a disk: %s is on a filesystem of type %#x, %v", d.path, fs.Type, err)
		}
	}
	if out, err := exec.Command("ip", "-4", "-br", "addr", "show", i.GatewayLink()).Output(); err != nil || !strings.Contains(string(out), i.Gateway().String()+"/32") {
		t.Errorf("gateway link: %s, %v", out, err)
	}
	if out, err := exec.Command("ip", "-4", "route", "get", i.Gateway().String()).Output(); err != nil || !strings.HasPrefix(string(out), "local ") {
		t.Errorf("the gateway address is not the box's own: %s, %v", out, err)
	}
	if err := b.Cleanup(context.Background(), "tbox1", true); err != nil {
		t.Error(err)
	}
	mustNone(t, b, "tbox1")
}

func TestSetupAgainPutsRight(t *testing.T) {
	b := boxes(t, "tbox2")
	i := setup(t, b, "tbox2")
	ca, rules := read(t, i.CADir()+"/ca.key.age"), save(t)
	stale := filepath.Join(i.TagDir(), "old.json")    // as of another slot, before a reboot
	noted := filepath.Join(i.StopDir(), "noted.json") // of a stop under way
	for _, file := range []string{stale, noted} {
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, cmd := range []string{
		"iptables -F TGO-tbox2-in", "ip link set " + i.GatewayLink() + " down", "ip addr flush dev " + i.GatewayLink(),
		"chmod 777 " + i.CreddDir(), "chown 0 " + i.CreddDir(), "umount -q " + i.NetNSDir() + "; rmdir " + i.NetNSDir(),
	} {
		if out, err := exec.Command("sh", "-c", cmd).CombinedOutput(); err != nil {
			t.Fatalf("%s: %s", cmd, out)
		}
	}
	again := setup(t, b, "tbox2")
	if again != i {
		t.Errorf("another slot: %v, then %v", i, again)
	}
	if read(t, i.CADir()+"/ca.key.age") != ca {
		t.Error("a CA that was good was replaced")
	}
	strip := func(s string) string { // other instances come and go
		var out []string
		for _, l := range strings.Split(s, "\n") {
			if strings.HasPrefix(l, "-A") && strings.Contains(l, "TGO-tbox2-") {
				out = append(out, l)
			}
		}
		return strings.Join(out, "\n")
	}
	if got := strip(save(t)); got != strip(rules) {
		t.Errorf("rules:\n%s\nwant\n%s", got, strip(rules))
	}
	if mode, u, _ := stat(t, i.CreddDir()); mode != 0o700 || u != i.UID(instance.Credd) {
		t.Errorf("credd's directory: %v, uid %d", mode, u)
	}
	if _, u, _ := stat(t, noted); u != i.UID(instance.Killswitchd) {
		t.Errorf("a note of before belongs to uid %d", u)
	}
	if mounts, err := mountsBelow(i.StopDir()); err != nil || len(mounts) != 1 {
		t.Errorf("mounted %v, %v", mounts, err)
	}
	if _, u, _ := stat(t, stale); u != i.UID(instance.Killswitchd) {
		t.Errorf("a tag of before belongs to uid %d, so killswitchd cannot read it", u)
	}
	if out, _ := exec.Command("ip", "-4", "-br", "addr", "show", i.GatewayLink()).Output(); !strings.Contains(string(out), i.Gateway().String()) {
		t.Errorf("gateway link: %s", out)
	}
}

// TestSetupCoversNoLivingKid: on a box whose kids' files are not in memory, they stay where they are.
func TestSetupCoversNoLivingKid(t *testing.T) {
	b := boxes(t, "tboxk")
	i := setup(t, b, "tboxk")
	for _, d := range kidDirs(i) { // as on a box that was set up by a build that mounted nothing
		if err := unix.Unmount(d.path, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			t.Fatal(err)
		}
	}
	living := filepath.Join(i.RuncRoot(), "kid1")
	if err := os.Mkdir(living, 0o700); err != nil {
		t.Fatal(err)
	}
	setup(t, b, "tboxk")
	if _, err := os.Stat(living); err != nil {
		t.Errorf("a living kid's files are covered: %v", err)
	}
	if err := os.Remove(living); err != nil {
		t.Fatal(err)
	}
	setup(t, b, "tboxk")
	var fs unix.Statfs_t
	if err := unix.Statfs(i.RuncRoot(), &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		t.Errorf("without a kid, %s is on a filesystem of type %#x, %v", i.RuncRoot(), fs.Type, err)
	}
}

func TestHalfWrittenCAIsReplaced(t *testing.T) {
	b := boxes(t, "tbox3")
	i := setup(t, b, "tbox3")
	cert, key, identity := inspectca.Files(i.CADir())
	other := func(name string, made time.Time) func() error {
		return func() error {
			ca, err := inspectca.New(name, made)
			return errors.Join(err, ca.Write(i.CADir(), "", i.UID(instance.Proxy), i.GroupID()))
		}
	}
	good := func() error {
		ca, err := inspectca.Load(i.CADir(), "")
		if err != nil {
			return err
		}
		return ca.Keep(caName(i), time.Now())
	}
	for name, breakIt := range map[string]func() error{
		"half a key":         func() error { return os.Truncate(key, 20) },
		"no certificate":     func() error { return os.Remove(cert) },
		"no identity":        func() error { return os.Remove(identity) },
		"about to expire":    other(caName(i), time.Now().Add(-350*24*time.Hour)),
		"another instance's": other("x", time.Now()),
	} {
		t.Run(name, func(t *testing.T) {
			if err := good(); err != nil {
				t.Fatalf("before: %v", err)
			}
			if err := breakIt(); err != nil {
				t.Fatal(err)
			}
			if good() == nil {
				t.Error("the broken CA is taken for a good one")
			}
			setup(t, b, "tbox3")
			if err := good(); err != nil {
				t.Errorf("after: %v", err)
			}
		})
	}
}

// Each failure leaves nothing of this run behind.
func TestFailingSetupRollsBack(t *testing.T) {
	const name = "tbox4"
	tests := []struct {
		name    string
		prepare func(t *testing.T, b *Boxes)
		want    string
	}{
		{"BPF refuses", func(_ *testing.T, b *Boxes) {
			b.BPF = fakeBPF{
				install:   func(instance.Instance, string, []string) error { return errors.New("loading: verifier says no") },
				uninstall: func(instance.Instance, string, []string) error { return nil },
			}
		}, "setting up instance tbox4: BPF programs: loading: verifier says no"},
		{"a file where a directory belongs", func(t *testing.T, _ *Boxes) {
			file := "/var/lib/tagout/" + name
			os.MkdirAll("/var/lib/tagout", 0o755)
			if err := os.WriteFile(file, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.Remove(file) })
		}, "/var/lib/tagout/tbox4 is not a directory: move it away"},
		{"a missing feature (E24)", func(_ *testing.T, b *Boxes) {
			off := doctor.Probes{BPF: func() []doctor.Feature { return nil }, Off: []string{"cgroup-kill"}}
			b.Doctor = off.Run
		}, "setting up instance tbox4: this machine lacks cgroup-kill (kernel option CONFIG_CGROUPS, in Linux since 5.14)"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := boxes(t, name)
			tt.prepare(t, &b)
			before := save(t)
			_, err := b.Setup(context.Background(), name, rawConfig(""))
			if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("Setup = %v, want %s", err, tt.want)
			}
			left, err := b.Leftovers(name, false)
			if err != nil || len(left) > 0 {
				t.Errorf("left over: %v, %v", left, err)
			}
			if _, err := instance.Open(name); !errors.Is(err, instance.ErrUnknown) {
				t.Error("the slot is still taken")
			}
			if strings.Count(before, "TGO-tbox4") != strings.Count(save(t), "TGO-tbox4") {
				t.Error("firewall rules are left")
			}
		})
	}
}

func TestFailingSetupKeepsWhatWasThere(t *testing.T) {
	b := boxes(t, "tbox5")
	i := setup(t, b, "tbox5")
	broken := b
	broken.BPF = fakeBPF{
		install:   func(instance.Instance, string, []string) error { return errors.New("no") },
		uninstall: func(instance.Instance, string, []string) error { return nil },
	}
	if _, err := broken.Setup(context.Background(), "tbox5", rawConfig("other")); err == nil {
		t.Fatal("Setup succeeded")
	}
	if got := read(t, i.BoxConfig()); got != "version: 1\n" {
		t.Errorf("the configuration is %q", got)
	}
	if _, err := instance.Open("tbox5"); err != nil {
		t.Error(err)
	}
	if !strings.Contains(save(t), "TGO-tbox5-in") {
		t.Error("the firewall is gone")
	}
	for _, p := range []string{i.SessionDir(), layout(t).V2(i.KidsCgroupRel())} {
		if _, err := os.Stat(p); err != nil {
			t.Error(err)
		}
	}
}

func TestSetupRefusesBadNames(t *testing.T) {
	for _, name := range []string{"", "Main", "../x", "a-b", "abcdefghijklm"} {
		if _, err := (Boxes{}).Setup(context.Background(), name, rawConfig("")); err == nil {
			t.Errorf("Setup(%q) succeeded", name)
		}
	}
}

// A slot whose gateway link is somebody else's is in use, whatever the registry says: another one is taken.
func TestOccupiedSlotIsPassedOver(t *testing.T) {
	const name = "tboxc"
	b := boxes(t, name)
	probe, err := instance.Claim(name)
	if err != nil {
		t.Fatal(err)
	}
	link := probe.GatewayLink()
	// While the slot is ours: another box could take it as soon as it is free.
	sh(t, "ip link add %s type veth peer name %sq && ip link set %s alias mine", link, link, link)
	t.Cleanup(func() { sh(t, "ip link del %s", link) })
	if err := probe.Release(); err != nil {
		t.Fatal(err)
	}
	i := setup(t, b, name)
	if i.Slot() == probe.Slot() {
		t.Errorf("slot %d was taken although %s is there and is not ours", i.Slot(), link)
	}
}
