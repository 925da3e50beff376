package cgroup

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const hybridMounts = `31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
37 31 0:34 / /sys/fs/cgroup/freezer rw,relatime shared:3 - cgroup cgroup rw,freezer
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
44 31 0:38 /some/part /elsewhere rw,relatime - cgroup2 cgroup2 rw
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
42 31 0:38 / /mnt/again rw,relatime - cgroup2 cgroup2 rw
not a line
`

const pureMounts = `29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot
50 23 0:50 / /mnt/with\040space rw - ext4 /dev/sda rw
`

func TestParseHybrid(t *testing.T) {
	l, err := parse(strings.NewReader(hybridMounts), "")
	if err != nil {
		t.Fatal(err)
	}
	if !l.Hybrid() {
		t.Error("not seen as hybrid")
	}
	for got, want := range map[string]string{
		l.V2("/tagout.x/kids"):      "/sys/fs/cgroup/unified/tagout.x/kids",
		l.Freezer("/tagout.x/kids"): "/sys/fs/cgroup/freezer/tagout.x/kids",
		l.V1("cpuacct", "/a"):       "/sys/fs/cgroup/cpu,cpuacct/a",
		l.V1("memory", "/a"):        "",
		l.V1("xattr", "/a"):         "",
		l.V1("name=systemd", "/a"):  "",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if n := len(l.hierarchies()); n != 5 {
		t.Errorf("%d hierarchies, want v2 and four v1: %v", n, l.hierarchies())
	}
}

func TestParsePureV2(t *testing.T) {
	l, err := parse(strings.NewReader(pureMounts), "")
	if err != nil {
		t.Fatal(err)
	}
	if l.Hybrid() || l.Freezer("/a") != "" {
		t.Errorf("seen as hybrid: %+v", l)
	}
	if got := l.V2("/a"); got != "/sys/fs/cgroup/a" {
		t.Errorf("V2 = %q", got)
	}
}

func TestParseWithoutV2SaysWhatToDo(t *testing.T) {
	_, err := parse(strings.NewReader("39 31 0:36 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"), "")
	if err == nil || !strings.Contains(err.Error(), "mount -t cgroup2") {
		t.Errorf("error %v does not say what to do", err)
	}
}

// pureMachine lays out a pure v2 machine below a temporary root. Its files are plain files: what would be a
// kernel answer has to be laid out by the test.
func pureMachine(t *testing.T) (Layout, string) {
	t.Helper()
	root := t.TempDir()
	info := filepath.Join(root, "mountinfo")
	base := filepath.Join(root, "sys/fs/cgroup")
	write := func(path, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(info, pureMounts)
	write(filepath.Join(base, "cgroup.subtree_control"), "cpuset")
	write(filepath.Join(base, "tagout.x/cgroup.subtree_control"), "pids memory cpu")
	write(filepath.Join(base, "tagout.x/kids/cgroup.subtree_control"), "pids cpu")
	l, err := detect(info, root)
	if err != nil {
		t.Fatal(err)
	}
	return l, base
}

func TestCreateOnPureV2HandsControllersDown(t *testing.T) {
	l, base := pureMachine(t)
	if err := l.Create("/tagout.x/kids/k1"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(base, "tagout.x/kids/k1")); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{
		"cgroup.subtree_control":               "+cpu", // the last of three writes to a plain file, over "cpuset"
		"tagout.x/cgroup.subtree_control":      "pids memory cpu",
		"tagout.x/kids/cgroup.subtree_control": "+memory",
	} {
		raw, err := os.ReadFile(filepath.Join(base, file))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(string(raw), want) {
			t.Errorf("%s holds %q, want it to begin with %q", file, raw, want)
		}
	}
	// The kid's own cgroup must not delegate: a cgroup that does can hold no process.
	if _, err := os.Stat(filepath.Join(base, "tagout.x/kids/k1/cgroup.subtree_control")); err == nil {
		t.Error("controllers were enabled below the leaf")
	}
}

func TestRemoveRefusesTheRoot(t *testing.T) {
	l, _ := pureMachine(t)
	for _, rel := range []string{"", "/", "/a/..", "."} {
		if err := l.Remove(context.Background(), rel); err == nil {
			t.Errorf("Remove(%q) went ahead", rel)
		}
	}
}

func TestSetWeight(t *testing.T) {
	l, base := pureMachine(t)
	file := filepath.Join(base, "tagout.x/kids/cpu.weight")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := l.SetWeight("/tagout.x/kids", 10000); err != nil {
		t.Fatal(err)
	}
	if raw, err := os.ReadFile(file); err != nil || string(raw) != "10000" {
		t.Errorf("cpu.weight holds %q, %v", raw, err)
	}
	if err := l.SetWeight("/tagout.x/none", 1); err == nil {
		t.Error("no error where there is no such cgroup")
	}
	hybrid, err := parse(strings.NewReader(hybridMounts), "/nonexistent")
	if err != nil {
		t.Fatal(err)
	}
	if err := hybrid.SetWeight("/tagout.x/kids", 1); err != nil {
		t.Errorf("on a hybrid machine: %v", err)
	}
}
