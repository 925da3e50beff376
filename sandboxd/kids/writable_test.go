package kids

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func writablePlan() Plan {
	p := plan()
	p.Image, p.Root = "host+writable", 64<<20
	p.Limits.Memory = 512 << 20
	return p
}

// TestWritableRootNeverReachesTheHost: the kid is root, writes over, adds and removes files of the machine, and the machine
// has them as they were. When the kid is gone, nothing is left of what it wrote.
func TestWritableRootNeverReachesTheHost(t *testing.T) {
	b := newBox(t, "tsbwrite")
	b.spawn("k1", writablePlan())
	before := hostFiles(t)
	r := b.sh("k1", `set -e
id -u
echo changed >/usr/bin/env; rm /usr/bin/sort; rm -r /usr/share/doc; mkdir /usr/games/mine; echo mine >/usr/games/mine/x
echo evil >/var/lib/dpkg/status; echo "mallory:x:0:0::/:/bin/sh" >>/etc/passwd; echo x >/x; echo x >/root/x; echo x >/var/x
chown 1000:1000 /usr/games/mine/x; chmod 4755 /usr/games/mine/x; stat -c '%u %g %a' /usr/games/mine/x; cat /usr/bin/env; ls /usr/share/doc /usr/bin/sort 2>&1 | wc -l
stat -c '%u' /usr/bin/cat /usr /var/lib/dpkg/info`)
	if want := "0\n1000 1000 4755\nchanged\n2\n0\n0\n0\n"; r.stdout.String() != want {
		t.Errorf("inside: %q %q %+v, want %q", r.stdout.String(), r.stderr.String(), r.exit, want)
	}
	if after := hostFiles(t); after != before {
		t.Errorf("the machine's files before: %s, after: %s", before, after)
	}
	for _, path := range []string{"/usr/games/mine", "/x", "/root/x", "/var/x"} {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is on the machine: %v", path, err)
		}
	}
	b.spawn("k2", writablePlan())
	if r := b.sh("k2", "ls /usr/games/mine /x; cat /usr/bin/env | head -c 4 | od -c | head -1"); !strings.Contains(r.stdout.String(), "E   L   F") || strings.Contains(r.stdout.String(), "x\n") {
		t.Errorf("a second kid sees %q %q", r.stdout.String(), r.stderr.String())
	}
	for _, kid := range []string{"k1", "k2"} {
		if err := b.Destroy(t.Context(), kid, "test", "test"); err != nil {
			t.Fatal(err)
		}
	}
	b.wantNothingLeft()
}

// hostFiles describes the machine's files that the test's kid changes.
func hostFiles(t *testing.T) string {
	t.Helper()
	out := ""
	for _, path := range []string{"/usr/bin/env", "/usr/bin/sort", "/usr/share/doc", "/var/lib/dpkg/status", "/etc/passwd", "/root", "/usr/games", "/var"} {
		info, err := os.Stat(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		out += fmt.Sprint(path, " ", info.Size(), " ", info.ModTime().UnixNano(), " ", info.Mode(), "\n")
	}
	return out
}

// TestWritableRootIsContained: root inside has what package managers need and nothing else, and no more roads out than
// any kid.
func TestWritableRootIsContained(t *testing.T) {
	b := newBox(t, "tsbwcont")
	p := writablePlan()
	p.Inputs = append(p.Inputs, probeInput(t))
	b.spawn("k1", p)
	first, count := b.inst.KidUIDRange(b.Manager.kids["k1"].rec.Session.Index)
	status := b.sh("k1", "cat /proc/self/status /proc/self/uid_map; cat /proc/self/mountinfo")
	text := strings.Join(strings.Fields(status.stdout.String()), " ")
	const caps = "00000000000000db" // chown, dac_override, fowner, fsetid, setgid, setuid
	for _, want := range []string{"CapInh: 0000000000000000", "CapPrm: " + caps, "CapEff: " + caps, "CapBnd: " + caps, "CapAmb: 0000000000000000",
		"NoNewPrivs: 1", "Seccomp: 2", "Uid: 0 0 0 0", fmt.Sprintf("0 %d %d", first, count)} {
		if !strings.Contains(text, want) {
			t.Errorf("inside the kid: %q is missing in\n%s", want, status.stdout.String())
		}
	}
	for line := range strings.Lines(status.stdout.String()) {
		f := strings.Fields(line)
		if len(f) < 10 || !strings.Contains(line, " - ") || strings.HasPrefix(f[4], "/dev/") || strings.HasPrefix(f[4], "/proc/") {
			continue // not a mount, or one of the devices and masks that runc gives every kid
		}
		fs := f[slices.Index(f, "-")+1]
		if writable := strings.HasPrefix(f[5], "rw"); writable && fs != "tmpfs" && fs != "overlay" && fs != "proc" {
			t.Errorf("a writable mount that is neither in memory nor the layer: %s", line)
		}
		if !strings.Contains(f[5], "nosuid") || fs == "overlay" && !strings.Contains(f[5], "nodev") {
			t.Errorf("a mount with set-uid programs or devices: %s", line)
		}
	}
	got := b.attacks("k1")
	for attack, errno := range got {
		if errno == "" && !slices.Contains([]string{"socket inet", "socket unix", "socket netlink", "socketpair unix", "write /x", "write /usr/x", "write /etc/passwd", "write /dev/x"}, attack) {
			t.Errorf("%s succeeded", attack)
		}
	}
	if got["write /x"] != "" || got["write /usr/x"] != "" {
		t.Errorf("it cannot write: %v: the rest proves nothing about a kid that can", got)
	}
	for _, line := range []string{"mknod /root/sda b 8 0", "mknod /usr/null c 1 3", "mount -t tmpfs x /mnt", "mount --bind / /mnt", "chroot / true", "unshare -U true", "kill 1",
		"cat /proc/1/environ", "ls /proc/1/root/", "umount /usr", "ip link set lo down", "hostname evil", "nsenter -t 1 -m true", "dmesg", "echo 1 >/proc/sys/kernel/hostname",
		"cat /etc/shadow", "ls /var/lib/private", "ls /etc/ssh", "su nobody -s /bin/sh -c 'mount -t proc p /mnt'"} {
		if r := b.sh("k1", line); r.exit.Code == 0 {
			t.Errorf("%s succeeded: %q", line, r.stdout.String())
		}
	}
}

// TestWritableRootIsBounded: what the kid writes outside of its workspace has one limit, and the kid that fills it fails alone.
func TestWritableRootIsBounded(t *testing.T) {
	b := newBox(t, "tsbwfull")
	p := writablePlan()
	p.Root = 8 << 20
	b.spawn("full", p)
	b.spawn("other", p)
	for _, path := range []string{"/usr/full", "/var/full", "/var/lib/dpkg/full"} {
		if r := b.sh("full", "head -c 16m /dev/zero >"+path); r.exit.Code == 0 || !strings.Contains(r.stderr.String(), "No space left") {
			t.Errorf("filling %s: %+v %q", path, r.exit, r.stderr.String())
		}
	}
	if r := b.sh("full", "(i=0; while : >/usr/f$i; do i=$((i+1)); done); rm -f /usr/full"); r.exit.Code != 0 || !strings.Contains(r.stderr.String(), "No space left") {
		t.Errorf("making files without end: %+v %q", r.exit, r.stderr.String())
	}
	if r := b.sh("other", "head -c 1m /dev/zero >/usr/x && echo fits"); r.stdout.String() != "fits\n" {
		t.Errorf("the other kid: %+v %q", r.exit, r.stderr.String())
	}
}

// TestKilledSandboxdWithWritableRoot: a successor adopts the whole kid, which is still root with its files, and leaves
// nothing of the half-made one.
func TestKilledSandboxdWithWritableRoot(t *testing.T) {
	b := newBox(t, "tsbwkill")
	t.Setenv("TAGOUT_TEST_IMAGE", "host+writable")
	doom(t, b)
	if half := b.inst.KidDir("half"); !strings.Contains(strings.Join(b.mounts(), " "), filepath.Join(half, "layers")) {
		t.Fatalf("the half-made kid has no layer: the rest proves little: %v", b.mounts())
	}
	if err := b.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := b.sh("whole", "echo x >/usr/x && id -u"); r.stdout.String() != "0\n" {
		t.Errorf("exec in the adopted kid: %q %q", r.stdout.String(), r.stderr.String())
	}
	if err := b.Destroy(t.Context(), "whole", "test", "test"); err != nil {
		t.Fatal(err)
	}
	b.wantNothingLeft()
}

// TestWritableSpawnsThatFail at every step leave nothing.
func TestWritableSpawnsThatFail(t *testing.T) {
	b := newBox(t, "tsbwfail")
	var names []string
	for _, s := range b.steps() {
		names = append(names, s.name)
	}
	for _, step := range names[slices.Index(names, "files"):] {
		b.fault = func(at string, after bool) error {
			if at == step && after {
				return errors.New("injected")
			}
			return nil
		}
		if _, err := b.Spawn(t.Context(), Request{Name: "k1", Purpose: "test", Plan: writablePlan()}); err == nil {
			t.Errorf("step %s: no error", step)
		}
		b.wantNothingLeft()
	}
}
