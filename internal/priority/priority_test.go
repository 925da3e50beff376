package priority

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"tagout/internal/testroot"
)

// TestMain lets the test binary be a process that leads a session of its own, so that its group is nobody else's.
func TestMain(m *testing.M) {
	if os.Getenv("PRIORITY_TEST_ROLE") == "raise" {
		raiseAndTell()
		return
	}
	os.Exit(m.Run())
}

// raiseAndTell prints what this process and its group have before, while and after it is raised.
func raiseAndTell() {
	var locked sync.WaitGroup
	held := make(chan struct{})
	defer close(held)
	for range 4 { // threads that are there before
		locked.Add(1)
		go func() {
			runtime.LockOSThread()
			locked.Done()
			<-held
		}()
	}
	locked.Wait()
	tell := func(when string) { fmt.Println(when, group(), strings.Join(threads(), ",")) }
	tell("before")
	giveBack := Raise()
	again := Raise() // of another command in the same session, which must not give back what is not its own
	again()
	tell("raised")
	giveBack()
	tell("after")
}

// threads returns the different nice values of this process's threads.
func threads() (out []string) {
	seen := map[int]bool{}
	tasks, _ := filepath.Glob("/proc/self/task/*") // the pattern is right
	for _, task := range tasks {
		tid, _ := strconv.Atoi(filepath.Base(task)) // the kernel's own
		if nice, err := niceOf(tid); err == nil && !seen[nice] {
			seen[nice] = true
			out = append(out, strconv.Itoa(nice))
		}
	}
	return out
}

// group returns the value of this process's group, "none" where the kernel has no such groups.
func group() string {
	nice, err := groupNice("/proc/self/autogroup")
	if err != nil {
		return "none"
	}
	return strconv.Itoa(nice)
}

func TestRaise(t *testing.T) {
	testroot.Require(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/usr/bin/nice", "-n", "3", exe)
	cmd.Env = append(os.Environ(), "PRIORITY_TEST_ROLE=raise")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	got := map[string][2]string{}
	for _, line := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		var when, group, nice string
		if _, err := fmt.Sscan(line, &when, &group, &nice); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		got[when] = [2]string{group, nice}
	}
	if got["before"] == got["raised"] || got["before"][1] == "-20" {
		t.Errorf("before %v, raised %v", got["before"], got["raised"])
	}
	if want := group(); want != "none" && got["raised"][0] != "-20" || got["raised"][1] != "-20" {
		t.Errorf("raised: group %s, threads %s, want -20 both", got["raised"][0], got["raised"][1])
	}
	if got["after"] != got["before"] {
		t.Errorf("before %v, after %v", got["before"], got["after"])
	}
}
