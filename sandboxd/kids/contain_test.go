package kids

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/wire"
	"tagout/sandboxd/files"
)

func (b *box) probe(kid, what string, args ...string) *result {
	b.t.Helper()
	return b.exec(kid, wire.ExecRequest{Argv: append([]string{"/workspace/probe"}, args...), Env: map[string]string{"TAGOUT_TEST_PROBE": what}})
}

func (b *box) attacks(kid string) map[string]string {
	b.t.Helper()
	r := b.probe(kid, "attacks")
	var got map[string]string
	if err := json.Unmarshal(r.stdout.Bytes(), &got); err != nil {
		b.t.Fatalf("probe: %v: %s%s %+v", err, r.stdout.String(), r.stderr.String(), r.exit)
	}
	return got
}

func TestKidIsContained(t *testing.T) {
	b := newBox(t, "tsbcont")
	p := plan()
	p.Inputs = []files.Input{probeInput(t)}
	b.spawn("k1", p)
	status := b.sh("k1", "cat /proc/self/status /proc/self/uid_map /proc/self/gid_map; ls -d /sys; cat /proc/kcore /proc/keys /proc/timer_list /proc/cmdline | wc -c; ulimit -c; ulimit -n; ls /home /root /var /run")
	text := strings.Join(strings.Fields(status.stdout.String()), " ")
	k := b.Manager.kids["k1"]
	first, count := b.inst.KidUIDRange(k.rec.Session.Index)
	for _, want := range []string{
		"CapInh: 0000000000000000", "CapPrm: 0000000000000000", "CapEff: 0000000000000000", "CapBnd: 0000000000000000", "CapAmb: 0000000000000000",
		"NoNewPrivs: 1", "Seccomp: 2", "Uid: 1000 1000 1000 1000", "Groups: ", fmt.Sprintf("0 %d %d", first, count),
		"0 0 256 /home: /root: /run: /var: tmp", // nothing in the masked files, no core dumps, 256 files
	} {
		if !strings.Contains(text, want) {
			t.Errorf("inside the kid: %q is missing in\n%s", want, text)
		}
	}
	if !strings.Contains(status.stderr.String(), "/sys") {
		t.Errorf("the kid has a /sys: %s", status.stderr.String())
	}
	got := b.attacks("k1")
	for attack, want := range map[string]string{
		"io_uring_setup": "EPERM", "bpf": "EPERM", "perf_event_open": "EPERM", "keyctl": "EPERM", "add_key": "EPERM", "userfaultfd": "EPERM",
		"setns": "EPERM", "fsopen": "EPERM", "move_mount": "EPERM", "open_tree": "EPERM", "pivot_root": "EPERM", "clone3": "ENOSYS", "pidfd_getfd": "EPERM",
		"umount": "EPERM", "mount": "EPERM", "chroot": "EPERM", "unshare user": "EPERM",
		"socket vsock": "EPERM", "socket alg": "EPERM", "socket packet": "EPERM", "socket bluetooth": "EPERM", "raw socket": "EPERM",
		"socket inet": "", "socket unix": "", "socket netlink": "",
		"socketpair inet": "EPERM", "socketpair alg": "EPERM", "socketpair tipc": "EPERM", "socketpair unix": "",
		"write /x": "EROFS", "write /usr/x": "EROFS", "write /etc/passwd": "EROFS EACCES", "write /dev/x": "EACCES",
		"write /proc/sys/kernel/core_pattern": "EROFS EACCES", "write /proc/sysrq-trigger": "EROFS ENOENT EACCES",
		"signal init": "EPERM", "trace init": "EPERM",
	} {
		if errno := got[attack]; errno != want && (errno == "" || !slices.Contains(strings.Fields(want), errno)) {
			t.Errorf("%s: %q, want %q", attack, got[attack], want)
		}
	}
}

// TestContainmentChecksNoticeAMissingFilter is the control of the test above.
func TestContainmentChecksNoticeAMissingFilter(t *testing.T) {
	b := newBox(t, "tsbopen")
	b.unconfined = true
	p := plan()
	p.Inputs = []files.Input{probeInput(t)}
	b.spawn("k1", p)
	if status := b.sh("k1", "cat /proc/self/status"); !strings.Contains(status.stdout.String(), "Seccomp:\t0") {
		t.Error("the filter is there although it was left out")
	}
	got := b.attacks("k1")
	for _, attack := range []string{"io_uring_setup", "keyctl", "add_key", "clone3", "unshare user"} {
		if got[attack] == "EPERM" || got[attack] == "ENOSYS" {
			t.Errorf("%s without a filter: %q: the check with the filter proves nothing", attack, got[attack])
		}
	}
}

func TestLimitsHold(t *testing.T) {
	b := newBox(t, "tsblimit")
	p := plan()
	p.Workspace, p.Tmp = 24<<20, 1<<20
	p.Limits.Memory, p.Limits.PIDs = 128<<20, 40
	p.Inputs = []files.Input{probeInput(t)}
	b.spawn("k1", p)

	var n int
	var errText string
	r := b.probe("k1", "forks")
	if _, err := fmt.Sscanf(r.stdout.String(), "%d %s", &n, &errText); err != nil || n < 5 || n > 40 || !strings.Contains(r.stdout.String(), "temporarily unavailable") {
		t.Errorf("forking until it fails: %q %q, want EAGAIN below 40", r.stdout.String(), r.stderr.String())
	}
	b.killAll("k1")
	r = b.probe("k1", "fill", "/tmp/full")
	if !strings.Contains(r.stdout.String(), "no space left") {
		t.Errorf("filling /tmp: %q", r.stdout.String())
	}
	r = b.probe("k1", "fill", "/workspace/full")
	if !strings.Contains(r.stdout.String(), "no space left") {
		t.Errorf("filling the workspace: %q", r.stdout.String())
	}
	if r := b.sh("k1", "rm /workspace/full; echo again >/workspace/x && cat /workspace/x"); r.stdout.String() != "again\n" {
		t.Errorf("after the flood: %q %q", r.stdout.String(), r.stderr.String())
	}
}

// killAll kills what earlier commands left running in the kid.
func (b *box) killAll(kid string) {
	b.t.Helper()
	b.sh(kid, "kill -9 -1")
}

// TestKillswitchdReachesTheSwitch writes the stop's files as killswitchd's own user, without any capability.
func TestKillswitchdReachesTheSwitch(t *testing.T) {
	b := newBox(t, "tsbswitch")
	k := b.spawn("k1", plan())
	as := func(uid int, file, value string) error {
		cmd := exec.Command("/bin/sh", "-c", `echo "$1" >"$2"`, "sh", value, file)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(b.inst.GroupID())}} // ids
		return cmd.Run()
	}
	files := [][2]string{{filepath.Join(k.Cgroup, "cgroup.freeze"), "0"}, {filepath.Join(k.Cgroup, "cgroup.kill"), "1"}}
	if dir := b.Manager.kids["k1"].rec.Session.Freezer; dir != "" {
		files = append([][2]string{{filepath.Join(dir, "freezer.state"), "THAWED"}}, files...)
	}
	for _, f := range files {
		if err := as(b.inst.UID(instance.Proxy), f[0], f[1]); err == nil {
			t.Errorf("another daemon's user may write %s", f[0])
		}
		if err := as(b.inst.UID(instance.Killswitchd), f[0], f[1]); err != nil {
			t.Errorf("killswitchd's user writing %s: %v", f[0], err)
		}
	}
	eventually(t, "the kid to be empty", func() bool {
		populated, err := cgroup.Populated(k.Cgroup)
		return err == nil && !populated
	})
}
