package kids

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/internal/testroot"
	"tagout/sandboxd/files"
)

// probed spawns a kid that has the probe.
func (b *box) probed(name string, change func(*Plan)) {
	b.t.Helper()
	p := plan()
	p.Inputs = []files.Input{probeInput(b.t)}
	if change != nil {
		change(&p)
	}
	b.spawn(name, p)
}

// ask runs a probe that answers in JSON.
func ask[T any](b *box, kid, what string, args ...string) T {
	b.t.Helper()
	return decode[T](b.t, b.probe(kid, what, args...).stdout.Bytes())
}

func decode[T any](t *testing.T, raw []byte) (out T) {
	t.Helper()
	if err := json.Unmarshal(raw, &out); err != nil {
		t.Fatalf("probe: %v: %s", err, raw)
	}
	return out
}

// onHost runs a probe on the machine itself, as the user uid: the control.
func onHost(t *testing.T, uid int, what string, args ...string) []byte {
	t.Helper()
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "tagout-probe-") // t.TempDir is closed to other users
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	program := filepath.Join(dir, "probe")
	if err := errors.Join(os.WriteFile(program, self, 0o755), os.Chmod(program, 0o755), os.Chmod(dir, 0o777)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, args...)
	cmd.Dir, cmd.Env = dir, []string{"TAGOUT_TEST_PROBE=" + what}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("probe %s on the machine: %v: %s", what, err, out)
	}
	return out
}

const nobody = 65534

func TestKidSeesItsOwnProcessesAlone(t *testing.T) {
	b := newBox(t, "tsbhide")
	b.spawn("k1", plan())
	r := b.sh("k1", "cd /proc && for p in [0-9]*; do echo $p; done; cat /proc/1/status /proc/1/cmdline; ls -d /proc/1; exit 0")
	pids := strings.Fields(r.stdout.String())
	if len(pids) == 0 {
		t.Fatalf("no process at all: %q %q", r.stdout.String(), r.stderr.String())
	}
	for _, pid := range pids {
		if pid == "1" || strings.HasPrefix(pid, "/") {
			t.Errorf("the kid sees kid-init: %q", pids)
		}
	}
	// The control: another user's /proc without the option.
	cmd := exec.Command("/bin/ls", "-d", "/proc/1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("nobody looks for pid 1 on this machine: %v %s: the test shows nothing", err, out)
	}
}

func TestKidLeavesNoCoreDump(t *testing.T) {
	b := newBox(t, "tsbcore")
	b.probed("k1", nil)
	for _, args := range [][]string{nil, {"set"}} {
		if got, want := b.probe("k1", "crash", args...).stdout.String(), "1 1 false\n"; got != want {
			t.Errorf("crash %v: limit and dump %q, want %q", args, got, want)
		}
	}
	if r := b.sh("k1", "cd /workspace; ls; ulimit -c 0 && ulimit -c"); r.stdout.String() != "probe\n0\n" {
		t.Errorf("after the crashes: %q %q", r.stdout.String(), r.stderr.String())
	}
	var old syscall.Rlimit
	if err := errors.Join(syscall.Getrlimit(syscall.RLIMIT_CORE, &old), syscall.Setrlimit(syscall.RLIMIT_CORE, &syscall.Rlimit{Cur: old.Max, Max: old.Max})); err != nil {
		t.Fatal(err)
	}
	defer syscall.Setrlimit(syscall.RLIMIT_CORE, &old) // only the control's
	if got := string(onHost(t, nobody, "crash")); !strings.HasSuffix(got, "true\n") {
		t.Errorf("the same crash on the machine: %q, want a dump: the test shows nothing", got)
	}
}

// TestNoHugePages lends the machine's pool a few pages for a moment.
func TestNoHugePages(t *testing.T) {
	testroot.Require(t)
	const pool = "/proc/sys/vm/nr_hugepages"
	had, err := os.ReadFile(pool)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(had)))
	if err == nil {
		err = os.WriteFile(pool, []byte(strconv.Itoa(n+4)), 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(pool, had, 0); err != nil {
			t.Error(err)
		}
	})
	b := newBox(t, "tsbhuge")
	b.probed("k1", nil)
	for way, errno := range ask[map[string]string](b, "k1", "huge") {
		if errno != "EPERM" {
			t.Errorf("%s: %q, want EPERM", way, errno)
		}
	}
	b.unconfined = true
	b.probed("k2", nil)
	for _, way := range []string{"mmap", "memfd_create"} {
		if got := ask[map[string]string](b, "k2", "huge"); got[way] != "" {
			t.Errorf("%s without the filter: %q: the test shows nothing", way, got[way])
		}
	}
}

// TestKidFillsItsDisksAlone is case K07: every place that a kid can write to has an end, in bytes and in files, and
// whoever reaches it disturbs nobody.
func TestKidFillsItsDisksAlone(t *testing.T) {
	b := newBox(t, "tsbfull")
	b.probed("k1", func(p *Plan) { p.Workspace, p.Tmp = 16<<20, 4<<20 })
	b.probed("k2", nil)
	had := places()
	got := ask[map[string]place](b, "k1", "places")
	for dir, most := range map[string]place{"/workspace": {16 << 20, 4096}, "/tmp": {4 << 20, 16384}, "/dev/shm": {16 << 20, 16384}} {
		if p, ok := got[dir]; !ok || p.Bytes == 0 || p.Bytes > most.Bytes || p.Files == 0 || p.Files > most.Files {
			t.Errorf("%s: %+v, want it writable, with at most %+v", dir, p, most)
		}
		delete(got, dir)
		r := ask[map[string]string](b, "k1", "exhaust", dir)
		if r["fallocate"] != "ENOSPC" || r["empty files"] != "ENOSPC" || r["nesting"] != "ENOSPC" {
			t.Errorf("%s: %v, want ENOSPC from all", dir, r)
		}
	}
	if len(got) != 0 {
		t.Errorf("the kid can also write to %v", got)
	}
	if r := b.sh("k2", "echo a >/workspace/a && echo b >/tmp/b && echo c >/dev/shm/c && cat /workspace/a /tmp/b /dev/shm/c"); r.stdout.String() != "a\nb\nc\n" {
		t.Errorf("its neighbour: %q %q", r.stdout.String(), r.stderr.String())
	}
	if p, ok := had[os.TempDir()]; ok && p.Bytes <= 16<<20 { // the control: the machine's own places are larger
		t.Errorf("this machine has %+v in %s: the test shows nothing", p, os.TempDir())
	}
	for _, kid := range []string{"k1", "k2"} {
		if err := b.Destroy(t.Context(), kid, "test", "full"); err != nil {
			t.Error(err)
		}
	}
	b.wantNothingLeft()
}

// TestDiskRateHolds reads past the page cache, with the limit and without.
func TestDiskRateHolds(t *testing.T) {
	file := bigFile(t)
	b := newBox(t, "tsbrate")
	read := func(kid string, rate int64) int {
		b.probed(kid, func(p *Plan) { p.Limits.DiskRate = rate })
		r := b.probe(kid, "read disk", file)
		var ms int
		var rest string
		if _, err := fmt.Sscan(r.stdout.String(), &ms, &rest); err != nil || rest != "<nil>" {
			t.Fatalf("reading %s: %q %q", file, r.stdout.String(), r.stderr.String())
		}
		return ms
	}
	if ms := read("k1", 4<<20); ms < 700 {
		t.Errorf("4 MiB at 4 MiB a second took %d ms", ms)
	}
	if ms := read("k2", 0); ms > 600 {
		t.Errorf("4 MiB without a limit took %d ms: the test shows nothing", ms)
	}
}

// TestNothingIsSwapped reads what the kernel holds a kid to.
func TestNothingIsSwapped(t *testing.T) {
	b := newBox(t, "tsbswap")
	b.spawn("k1", plan())
	rel := b.inst.KidsCgroupRel() + "/k1"
	want := map[string]string{filepath.Join(b.layout.V2(rel), "memory.swap.max"): "0", filepath.Join(b.layout.V2(rel), "memory.oom.group"): "1"}
	if dir := b.layout.V1("memory", rel); dir != "" {
		want = map[string]string{filepath.Join(dir, "memory.swappiness"): "0"}
	}
	for file, value := range want {
		if got, err := os.ReadFile(file); err != nil || strings.TrimSpace(string(got)) != value {
			t.Errorf("%s: %q, %v, want %s", file, got, err, value)
		}
	}
}

// bigFile finds a file of 4 MiB that kids can read.
func bigFile(t *testing.T) string {
	t.Helper()
	testroot.Require(t)
	found := ""
	err := filepath.WalkDir("/usr/lib", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil
		}
		if info, err := d.Info(); err == nil && info.Size() >= 4<<20 && info.Mode().Perm()&0o004 != 0 {
			found = path
			return fs.SkipAll
		}
		return nil
	})
	if err != nil || found == "" {
		t.Fatalf("no file of 4 MiB below /usr/lib: %v", err)
	}
	return found
}

func TestNoExecScratch(t *testing.T) {
	b := newBox(t, "tsbnoexec")
	b.probed("k1", nil)
	for where, errno := range ask[map[string]string](b, "k1", "execute", "/workspace", "/tmp") { // the control
		if errno != "" {
			t.Errorf("%s: %q, want it executed", where, errno)
		}
	}
	// Here the probe could not be started either.
	b.spawn("k2", func() Plan { p := plan(); p.NoExec = true; return p }())
	r := b.sh("k2", `for d in /workspace /tmp /dev/shm; do cp /bin/true $d/t && $d/t; echo $?; echo 'exit 7' >$d/s; sh $d/s; echo $?; done`)
	if got := strings.Join(strings.Fields(r.stdout.String()), " "); got != "126 7 126 7 126 7" {
		t.Errorf("exit codes %q, want 126 (not executable) for programs and 7 for scripts: %s", got, r.stderr.String())
	}
	loader := b.sh("k2", `cp /bin/true /tmp/t; for l in /lib64/ld-linux-*.so* /lib/ld-linux-*.so*; do [ -e $l ] || continue; $l /bin/true && echo ok; $l /tmp/t || echo refused; done`)
	if got := loader.stdout.String(); !strings.HasPrefix(got, "ok\nrefused\n") || strings.Contains(got, "ok\nok\n") {
		t.Errorf("through the loader: %q %q", got, loader.stderr.String())
	}
}

// TestRuntimeProgramIsSealed: what runc's process in a kid could take hold of is a copy that nobody can write to, before
// anything of the kid's own runs.
func TestRuntimeProgramIsSealed(t *testing.T) {
	b := newBox(t, "tsbseal")
	var seals int
	var sealErr, writeErr error
	b.fault = func(step string, done bool) error {
		if step != "start" || done {
			return nil
		}
		b.mu.Lock()
		exe := fmt.Sprintf("/proc/%d/exe", b.kids["k1"].pid)
		b.mu.Unlock()
		f, err := os.Open(exe)
		if err != nil {
			return err
		}
		defer f.Close() // only read
		seals, sealErr = unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
		var w *os.File
		if w, writeErr = os.OpenFile(exe, os.O_WRONLY, 0); writeErr == nil {
			_, writeErr = w.Write([]byte{0})
			w.Close() // failed, as it should
		}
		return nil
	}
	b.spawn("k1", plan())
	want := unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	if sealErr != nil || seals&want != want || writeErr == nil {
		t.Errorf("seals %#x, %v; writing to it: %v", seals, sealErr, writeErr)
	}
}
