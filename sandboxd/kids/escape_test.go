package kids

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/wire"
)

// TestWorkingDirectoryLeadsNowhere is CVE-2024-21626: a command whose working directory is a descriptor that the
// runtime has open may find itself outside.
func TestWorkingDirectoryLeadsNowhere(t *testing.T) {
	b := newBox(t, "tsbcwd")
	b.probed("k1", nil)
	marker := filepath.Join(t.TempDir(), "marker")
	if err := os.WriteFile(marker, []byte("outside"), 0o644); err != nil {
		t.Fatal(err)
	}
	up := strings.Repeat("../", 40) + marker[1:]
	for fd := range 16 {
		for _, of := range []string{"self", "1"} {
			dir := fmt.Sprintf("/proc/%s/fd/%d", of, fd)
			r, err := runExec(t.Context(), b.Manager, "k1", wire.ExecRequest{Argv: []string{"/bin/cat", up, "/proc/self/cwd/" + up}, Dir: dir})
			if err == nil && strings.Contains(r.stdout.String(), "outside") {
				t.Errorf("%s leads out: %q", dir, r.stdout.String())
			}
		}
	}
	// The control: the same command in a directory outside.
	cmd := exec.Command("/bin/cat", up)
	cmd.Dir = t.TempDir()
	if out, err := cmd.Output(); err != nil || string(out) != "outside" {
		t.Errorf("on the machine: %q, %v: the test shows nothing", out, err)
	}
}

// TestRuntimeIsNotOverwritten is CVE-2019-5736: a kid's program is a script whose interpreter is whoever starts it,
// and another of its programs tries to write to everything that starts.
func TestRuntimeIsNotOverwritten(t *testing.T) {
	b := newBox(t, "tsbexe")
	b.probed("k1", nil)
	programs := []string{initPath}
	if runc, err := exec.LookPath("runc"); err == nil {
		programs = append(programs, runc)
	}
	before := sums(t, programs)
	r := b.sh("k1", `printf '#!/proc/self/exe\n' >/workspace/trap && chmod 755 /workspace/trap && ls -l /workspace/trap`)
	if r.exit.Code != 0 {
		t.Fatalf("setting the trap: %+v %s", r.exit, r.stderr.String())
	}
	done := make(chan *result)
	go func() {
		out, err := runExec(t.Context(), b.Manager, "k1", wire.ExecRequest{Argv: []string{"/workspace/probe", "60"}, Env: map[string]string{"TAGOUT_TEST_PROBE": "lie in wait"}})
		if err != nil {
			t.Error(err)
		}
		done <- out
	}()
	for range 60 {
		runExec(t.Context(), b.Manager, "k1", wire.ExecRequest{Argv: []string{"/workspace/trap"}}) // it does not matter how it ends
		b.sh("k1", "true")
	}
	b.sh("k1", "touch /workspace/enough")
	var got struct{ Looked, Written int }
	out := <-done
	if out == nil {
		return
	}
	if err := json.Unmarshal(out.stdout.Bytes(), &got); err != nil || got.Looked == 0 {
		t.Fatalf("lying in wait: %v %q %q", err, out.stdout.String(), out.stderr.String())
	}
	if got.Written != 0 {
		t.Errorf("%d of %d programs could be written to", got.Written, got.Looked)
	}
	if after := sums(t, programs); after != before {
		t.Errorf("the programs that start commands have changed:\n%s\nwas\n%s", after, before)
	}
	// The control: a program of the kid's own can be written to through /proc, once it does not run.
	control := b.probe("k1", "write exe")
	if strings.TrimSpace(control.stdout.String()) != "written" {
		t.Errorf("its own program: %q %q: the test shows nothing", control.stdout.String(), control.stderr.String())
	}
}

func sums(t *testing.T, files []string) string {
	t.Helper()
	var out strings.Builder
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&out, "%x %s\n", sha256.Sum256(raw), file)
	}
	return out.String()
}

// TestKeyringsAreApart: also without the filter, which keeps kids from keyrings altogether, no kid has the machine's
// session keyring or another kid's, and none finds what is in them.
func TestKeyringsAreApart(t *testing.T) {
	b := newBox(t, "tsbkeys")
	b.unconfined = true
	host := strings.TrimSpace(string(onHost(t, 0, "session keyring")))
	seen := map[string]string{host: "the machine"}
	for _, kid := range []string{"k1", "k2"} {
		b.probed(kid, nil)
		r := b.probe(kid, "session keyring")
		ring := strings.TrimSpace(r.stdout.String())
		if ring == "" || ring == "0" || r.exit.Code != 0 {
			t.Errorf("%s without the filter: %q %+v: the test shows nothing", kid, ring, r.exit)
		}
		if other, taken := seen[ring]; taken {
			t.Errorf("%s has the session keyring of %s: %s", kid, other, ring)
		}
		seen[ring] = kid
	}
	b.sh("k1", "TAGOUT_TEST_PROBE='hold key' /workspace/probe >/workspace/id 2>&1 &")
	var id, own string
	eventually(t, "k1 to hold a key", func() bool {
		fields := strings.Fields(b.sh("k1", "cat /workspace/id").stdout.String())
		if len(fields) == 2 {
			id, own = fields[0], fields[1]
		}
		return id != ""
	})
	if own != "found" {
		t.Errorf("k1 looking for its own key %s: %q: the test shows nothing", id, own)
	}
	if r := b.probe("k2", "find key", id); r.stdout.Len() != 0 || r.exit.Code != 1 {
		t.Errorf("k2 looking for the key %s of k1: %q %+v", id, r.stdout.String(), r.exit)
	}
}
