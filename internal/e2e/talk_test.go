package e2e

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/testpty"
	"tagout/internal/wire"
)

// TestTalk is what somebody does with a command in a kid: bytes both ways, a shell, its size, leaving it, a stop.
func TestTalk(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(bareCard, nil).Name
	want := make([]byte, 1<<20)
	rand.NewChaCha8([32]byte{7}).Read(want)
	r := box.TagoutIn(bytes.NewReader(want), "exec", kid, "-i", "--", "sh", "-c", "tee /dev/stderr; exit 5")
	if r.Code != 5 || r.Stdout != string(want) || r.Stderr != string(want) {
		t.Errorf("code %d, %d bytes of output, %d of errors", r.Code, len(r.Stdout), len(r.Stderr))
	}
	typing := func(args ...string) *testpty.Session {
		args = append([]string{"--instance", box.Inst.Name()}, args...)
		return testpty.Start(t, exec.Command(filepath.Join(box.Bin, "tagout"), args...), 31, 101)
	}
	s := typing("exec", kid, "-t", "--", "sh")
	s.WaitRaw()
	s.Type("stty size; cat\r")
	s.Wait("31 101")
	s.Type("meow\r")
	s.Wait("meow\r\nmeow") // by cat: an interrupt before it runs may be for stty, which has ended
	s.Type("\x03")
	s.Wait("$ ") // what is typed before may be thrown away
	s.Type("echo in''terrupted\r")
	s.Wait("interrupted")
	s.Type("\x1dd")
	if code := s.End(); code != 0 {
		t.Errorf("left with %d", code)
	}
	var execs []wire.Exec
	if err := json.Unmarshal([]byte(box.Must("execs", kid, "--json")), &execs); err != nil {
		t.Fatal(err)
	}
	if len(execs) != 1 || !execs[0].TTY || !execs[0].Detached {
		t.Fatalf("after leaving: %+v", execs)
	}
	s = typing("attach", kid, execs[0].ID)
	s.WaitRaw()
	s.Resize(40, 120)
	// The size goes its own way, beside what is typed.
	s.Type("until stty size | grep '40 1[2]0'; do sleep .1; done; echo go''es on\r")
	s.Wait("40 120")
	s.Wait("goes on")
	s.Type("exit 9\r")
	if code := s.End(); code != 9 {
		t.Errorf("the shell ended with %d", code)
	}
	file := filepath.Join(t.TempDir(), "card.yaml")
	if err := os.WriteFile(file, []byte(bareCard), 0o600); err != nil {
		t.Fatal(err)
	}
	if r = box.TagoutIn(bytes.NewReader(want), "run", "-i", file, "--", "sh", "-c", "cat; exit 6"); r.Code != 6 || r.Stdout != string(want) {
		t.Errorf("run -i: code %d, %d bytes of output, %s", r.Code, len(r.Stdout), r.Stderr)
	}
	s = typing("run", "-t", file, "--", "sh")
	s.WaitRaw()
	s.Type("stty size; exit 8\r")
	s.Wait("31 101")
	if code := s.End(); code != 8 {
		t.Errorf("run -t: %d", code)
	}
	if left := box.Must("list"); strings.Count(left, "\n") != 2 {
		t.Errorf("after both runs there are:\n%s", left)
	}
	s = typing("exec", kid, "-t", "--", "sh")
	s.WaitRaw()
	box.Stop(wire.StopRequest{Scope: wire.Scope{Kid: kid}})
	if code := s.End(); code != 3 {
		t.Errorf("stopped with %d", code)
	}
	s.Wait("the kid was stopped")
}
