package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/cgroup"
	"tagout/internal/testroot"
)

func goodBPF() []Feature {
	return []Feature{{Name: "bpf-link", Since: "4.5", Use: "checks packets on a kid's link"}}
}

func run(t *testing.T, p Probes) Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return p.Run(ctx)
}

// A machine on which the privileged tests run has everything that is needed.
func TestRunOnThisMachine(t *testing.T) {
	testroot.Require(t)
	r := run(t, Probes{BPF: goodBPF})
	t.Logf("\n%s", r)
	if err := r.Refusal(); err != nil {
		t.Error(err)
	}
	if !r.OK {
		t.Error("the report is not OK")
	}
	l, err := cgroup.Detect()
	if err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(l.V2(fmt.Sprintf("/tagout-doctor-%d", os.Getpid()))); len(left) > 0 { // others may run now
		t.Errorf("left over: %v", left)
	}
}

// TestAKilledDoctorsTrialIsRemoved: of one that was killed, with a process still in it, and of one that had our pid.
func TestAKilledDoctorsTrialIsRemoved(t *testing.T) {
	testroot.Require(t)
	l, err := cgroup.Detect()
	if err != nil {
		t.Fatal(err)
	}
	dead := exec.Command("/bin/true")
	if err := dead.Run(); err != nil {
		t.Fatal(err)
	}
	sleep := exec.Command("/bin/sleep", "60")
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	defer sleep.Wait()
	defer sleep.Process.Kill()
	for _, pid := range []int{dead.Process.Pid, os.Getpid()} {
		if err := os.Mkdir(l.V2(trialPrefix+fmt.Sprint(pid)), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := cgroup.Join(l.V2(trialPrefix+fmt.Sprint(dead.Process.Pid)), sleep.Process.Pid); err != nil {
		t.Fatal(err)
	}
	if _, err := probeKill(t.Context()); err != nil {
		t.Error(err)
	}
	for _, pid := range []int{dead.Process.Pid, os.Getpid()} {
		if _, err := os.Stat(l.V2(trialPrefix + fmt.Sprint(pid))); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the trial cgroup of pid %d is still there: %v", pid, err)
		}
	}
}

// E24: a kernel without one needed feature.
func TestForcedOff(t *testing.T) {
	testroot.Require(t)
	tests := []struct {
		off    string
		needed bool
		want   []string
	}{
		{"bpf-link", true, []string{"lacks bpf-link", "CONFIG_NET_XGRESS or CONFIG_NET_SCH_INGRESS", "4.5"}},
		{"cgroup-kill", true, []string{"lacks cgroup-kill", "CONFIG_CGROUPS", "5.14", "boot a kernel"}},
		{"so-mark", true, []string{"lacks so-mark", "5.17"}},
		{"iptables", true, []string{"lacks iptables", "CONFIG_NF_TABLES", "apt-get install iptables"}},
		{"sock-destroy", false, nil},
	}
	for _, tt := range tests {
		t.Run(tt.off, func(t *testing.T) {
			r := run(t, Probes{BPF: goodBPF, Off: []string{tt.off}})
			err := r.Refusal()
			if (err != nil) != tt.needed || r.OK == tt.needed {
				t.Fatalf("Refusal = %v, OK = %v, needed = %v", err, r.OK, tt.needed)
			}
			for _, w := range tt.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("the refusal does not say %q: %v", w, err)
				}
			}
		})
	}
}

func TestMissingBPF(t *testing.T) {
	r := Report{}
	for _, pr := range (Probes{BPF: func() []Feature {
		return []Feature{{Name: "bpf-ringbuf", Since: "5.8", Use: "tells of each denial", Err: errors.New("creating a ring buffer:\n\tinvalid argument")}}
	}}).bpfProbes()[1:] {
		c := pr.Check
		_, err := pr.run(context.Background())
		c.OK, c.Missing = err == nil, oneLine(err)
		r.Checks = append(r.Checks, c)
	}
	const want = "this machine lacks bpf-ringbuf (kernel option CONFIG_BPF_SYSCALL, in Linux since 5.8): creating a ring buffer:; invalid argument: boot a kernel from Linux 5.8 on that has this option: run `tagout doctor` for the whole list"
	if err := r.Refusal(); err == nil || err.Error() != want {
		t.Errorf("Refusal = %v\nwant %s", err, want)
	}
	if (Probes{}).bpfProbes()[1].Needed != true {
		t.Error("a build that cannot probe for BPF must count as missing")
	}
}

func TestString(t *testing.T) {
	r := Report{Checks: []Check{
		{Name: "root", OK: true, Needed: true, Found: "uid 0"},
		{Name: "tcx", Needed: true, Missing: "no tcx", Cost: "less", Fix: "more"},
		{Name: "clock", Missing: "no clock"},
	}}
	const want = "ok       root                 uid 0\n" +
		"MISSING  tcx                  no tcx; costs: less; to get it: more\n" +
		"warning  clock                no clock\n"
	if got := r.String(); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	raw, err := json.Marshal(r)
	if err != nil || !strings.Contains(string(raw), `{"name":"root","ok":true,"needed":true,"found":"uid 0"}`) {
		t.Errorf("JSON: %s, %v", raw, err)
	}
}

func TestParseVersion(t *testing.T) {
	tests := map[string]version{
		"6.18.44-fc-v669": {6, 18, 44}, "6.6": {6, 6, 0}, "1.1.5+ds1": {1, 1, 5}, "1.2.0-rc.1": {1, 2, 0}, "5.10.0-28-amd64": {5, 10, 0},
	}
	for in, want := range tests {
		if got, err := parseVersion(in); err != nil || got != want {
			t.Errorf("parseVersion(%q) = %v, %v, want %v", in, got, err, want)
		}
	}
	for _, bad := range []string{"", "x", "-1.2", "99999999999999999999.1"} {
		if v, err := parseVersion(bad); err == nil {
			t.Errorf("parseVersion(%q) = %v, want an error", bad, v)
		}
	}
}

func TestRuncVersions(t *testing.T) {
	tests := []struct {
		out              string
		ok2024, ok2025   bool
		explains2024Said string
	}{
		{"runc version 1.1.5+ds1\ncommit: 1.1.5+ds1-1+deb12u1\nspec: 1.0.2-dev\n", true, false, "has the fix of CVE-2024-21626"},
		{"runc version 1.1.5+ds1\ncommit: 1.1.5+ds1-1\n", false, false, "CVE-2024-21626"},
		{"runc version 1.1.5\ncommit: v1.1.5-0-gf19387a6\n", false, false, "CVE-2024-21626"},
		{"runc version 1.1.7-0ubuntu1~22.04.2\ncommit: 1.1.7-0ubuntu1~22.04.2\n", true, false, "has the fix"},
		{"runc version 1.1.12\n", true, false, "1.1.12"},
		{"runc version 1.2.7\n", true, false, ""},
		{"runc version 1.2.8\n", true, true, ""},
		{"runc version 1.3.2\n", true, false, ""},
		{"runc version 1.3.3\n", true, true, ""},
		{"runc version 1.4.0\n", true, true, ""},
		{"runc version 2.0.0\n", true, true, ""},
	}
	for _, tt := range tests {
		b, err := parseRunc(tt.out)
		if err != nil {
			t.Fatal(err)
		}
		found, err := b.judge2024()
		if (err == nil) != tt.ok2024 {
			t.Errorf("%q: 2024: %q, %v", tt.out, found, err)
		}
		if said := found + oneLineOr(err); !strings.Contains(said, tt.explains2024Said) {
			t.Errorf("%q says %q, not %q", tt.out, said, tt.explains2024Said)
		}
		if found, err := b.judge2025(); (err == nil) != tt.ok2025 {
			t.Errorf("%q: 2025: %q, %v", tt.out, found, err)
		}
	}
	if _, err := parseRunc("crun version 1.8.1\n"); err == nil {
		t.Error("an output without a version of runc was read")
	}
}

// TestChangelogOfTheBuild: a distribution's backport counts where the changelog is that of the build which runs.
func TestChangelogOfTheBuild(t *testing.T) {
	t.Parallel()
	const head = "runc (1.1.5+ds1-1+deb12u9) bookworm-security; urgency=high\n\n  * CVE-2025-31133, CVE-2025-52565, CVE-2025-52881: fixed\n"
	for _, c := range []struct {
		commit, changelog string
		ok2024, ok2025    bool
	}{
		{"1.1.5+ds1-1+deb12u9", head, true, true},
		{"1.1.5+ds1-1", head, false, false}, // an older build of the same package
		{"", head, false, false},
		{"1.1.5+ds1-1", "runc (1.1.5+ds1-1) unstable; urgency=medium\n\n  * New\n\nrunc (1.0) x\n  * CVE-2024-21626\n", true, false},
		{"1.1.5+ds1-1", "", false, false},
	} {
		b := runcBuild{text: "1.1.5+ds1", v: version{1, 1, 5}, commit: c.commit, changelog: c.changelog}
		if _, err := b.judge2024(); (err == nil) != c.ok2024 {
			t.Errorf("%+v: 2024: %v", c, err)
		}
		if _, err := b.judge2025(); (err == nil) != c.ok2025 {
			t.Errorf("%+v: 2025: %v", c, err)
		}
	}
}

func TestTrialOfTheRuntime(t *testing.T) {
	t.Parallel()
	works := func(context.Context) (string, error) { return "ran", nil }
	broken := func(context.Context) (string, error) { return "", errors.New("crun: cannot join\nhybrid") }
	for name, c := range map[string]struct {
		trial  func(context.Context) (string, error)
		needed bool
		ok     bool
	}{"works": {works, true, true}, "cannot run here": {broken, true, false}, "not tried": {nil, false, false}} {
		p := (Probes{Trial: c.trial}).trialProbes()[0]
		_, err := p.run(t.Context())
		if p.Needed != c.needed || (err == nil) != c.ok {
			t.Errorf("%s: %+v, %v", name, p.Check, err)
		}
	}
}

func oneLineOr(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestMountBPF(t *testing.T) {
	testroot.Require(t)
	dir := filepath.Join(t.TempDir(), "bpf")
	found, err := MountBPF(dir)
	if err != nil || !strings.HasSuffix(found, "just now") {
		t.Fatalf("MountBPF = %q, %v", found, err)
	}
	t.Cleanup(func() { unmount(t, dir) })
	if found, err = MountBPF(dir); err != nil || strings.HasSuffix(found, "just now") {
		t.Errorf("the second MountBPF = %q, %v, want it to find the first", found, err)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}
