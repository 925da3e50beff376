package bench

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/testroot"
)

// TestKidsFiguresAreProduced runs the benchmark of kids with tiny counts, beside docker where it happens to be installed.
// It looks at no figure's size, and that nothing is left.
func TestKidsFiguresAreProduced(t *testing.T) {
	testroot.Require(t)
	t.Parallel()
	dir := t.TempDir()
	tagout := newCommand(t, "kbt")
	said := tagout.run("bench", "kids", "--short", "--bin-dir", tagout.bin, "--out", dir)
	metrics := figures(t, filepath.Join(dir, "kids.json"))
	want := map[string]string{ // -> its peer
		"spawn to first output, p50": "runc run, bare", "spawn to first output, p99": "runc run, limits and filter of a kid",
		"stage of a spawn, p50: runtime": "", "first command in a new kid": "", "command in a kid, request to its end, p50": "runc exec",
		"3 spawns at once": "one spawn alone, p50", "memory of an idle kid above an idle process": "an idle process (sleep), measured the same way",
		"the same, charged to a kid's memory cgroup": "", "the same, growth of all daemons": "", "spawn to first output beside 2 idle kids": "the first of them",
	}
	if installed("/usr/sbin/dockerd", "/usr/bin/docker", "/usr/bin/unshare") {
		want["spawn to first output, p9"], want["spawn to first output, p5"] = dockerBridge, dockerAlone
	}
	for prefix, peer := range want {
		found := false
		for _, m := range metrics {
			if strings.HasPrefix(m.Metric, prefix) && m.Peer == peer {
				found = true
				if m.Value <= 0 && m.Unit == "ms" || peer != "" && m.PeerValue <= 0 && m.Unit == "ms" {
					t.Errorf("%s took no time: %+v", prefix, m)
				}
			}
		}
		if !found {
			t.Errorf("there is no figure for %q beside %q:\n%s", prefix, peer, said)
		}
	}
	tagout.run("cleanup", "--check")
}

// TestCutOffBenchLeavesNothingAfterCleanup kills the benchmark while a peer's container runs, and looks for what a cleanup
// has left: processes, and directories of containers.
func TestCutOffBenchLeavesNothingAfterCleanup(t *testing.T) {
	testroot.Require(t)
	t.Parallel()
	tagout := newCommand(t, "kbk")
	cmd := exec.CommandContext(t.Context(), filepath.Join(tagout.bin, "tagout"), "--instance", tagout.name,
		"bench", "kids", "--spawns", "1000", "--bin-dir", tagout.bin, "--out", t.TempDir())
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	own := "tagout." + tagout.name
	peer := "/" + own + "/bench/" // of runc; docker's is there where docker is
	if installed("/usr/sbin/dockerd", "/usr/bin/docker", "/usr/bin/unshare") {
		peer = "/" + own + "/bench-docker/"
	}
	seen := false
	for deadline := time.Now().Add(time.Minute); !seen && time.Now().Before(deadline); time.Sleep(time.Millisecond) { // between looks
		seen = len(processesIn(t, peer)) > 0
	}
	cmd.Process.Kill() // Wait tells
	cmd.Wait()         // killed on purpose
	if !seen {
		t.Fatalf("no container of a peer was seen:\n%s", said.Bytes())
	}
	tagout.run("cleanup", "--purge")
	if left := processesIn(t, "/"+own+"/"); len(left) > 0 {
		t.Errorf("processes are left: %v", left)
	}
	tagout.run("cleanup", "--check")
}

// processesIn returns the command lines of the living processes in cgroups whose paths have part in them.
func processesIn(t *testing.T, part string) []string {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, file := range all {
		raw, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(raw), part) {
			continue
		}
		line, err := os.ReadFile(filepath.Join(filepath.Dir(file), "cmdline"))
		if err == nil && len(line) > 0 { // one that is dead and not reaped has none
			out = append(out, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return out
}
