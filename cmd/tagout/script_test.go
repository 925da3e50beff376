package main

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"tagout": main,
	})
}

// The stories need no running daemon. `code N tagout …` wants that exit code; `nobody N tagout …` also runs
// as a user without rights.
func TestScripts(t *testing.T) {
	bin := placeForNobody(t)
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code": func(ts *testscript.TestScript, _ bool, args []string) {
				want(ts, args[0], ts.Exec(args[1], args[2:]...))
			},
			"nobody": func(ts *testscript.TestScript, _ bool, args []string) { asNobody(ts, bin, args) },
		},
		Condition: func(cond string) (bool, error) {
			if cond == "root" {
				return os.Geteuid() == 0, nil
			}
			return false, errors.New("unknown condition " + cond)
		},
	})
}

func want(ts *testscript.TestScript, code string, err error) {
	got := 0
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		got = exit.ExitCode()
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if strconv.Itoa(got) != code {
		ts.Fatalf("exit code %d, want %s", got, code)
	}
}

// placeForNobody copies this test's binary to where every user reaches it, under the name tagout.
func placeForNobody(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "tagout-script-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	in, err := os.Open(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	bin := filepath.Join(dir, "tagout")
	out, err := os.OpenFile(bin, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(out, in); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	return bin
}

func asNobody(ts *testscript.TestScript, bin string, args []string) {
	cmd := exec.Command(bin, args[2:]...)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = ts.Stdout(), ts.Stderr()
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	want(ts, args[0], cmd.Run())
}
