package kids

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// runEscapeProbe is the part of runProbe about what a kid could take hold of.
func runEscapeProbe(name string) int {
	switch name {
	case "lie in wait":
		lieInWait()
	case "write exe":
		return writeExe()
	case "session keyring":
		ring, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_SESSION_KEYRING, false)
		return tell(ring, err)
	case "hold key":
		id, err := unix.AddKey("user", "tagout-test", []byte("secret"), unix.KEY_SPEC_SESSION_KEYRING)
		if tell(id, err) == 0 && findKey(id) == nil {
			fmt.Println("found")
		}
		time.Sleep(time.Minute) // killed with the kid
	case "find key":
		id, err := strconv.Atoi(os.Args[1])
		if err == nil {
			err = findKey(id)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		fmt.Println("found")
	default:
		return 2
	}
	return 0
}

// findKey reads the key by its number, and looks for its name where that is refused.
func findKey(id int) error {
	if _, err := unix.KeyctlBuffer(unix.KEYCTL_READ, id, make([]byte, 16), 0); err == nil {
		return nil
	}
	_, err := unix.KeyctlSearch(unix.KEY_SPEC_SESSION_KEYRING, "user", "tagout-test", 0)
	return err
}

func tell(n int, err error) int {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println(n)
	return 0
}

// lieInWait opens the program of everything that it sees for reading, and then, by that, for writing, until a file
// tells it that it is enough.
func lieInWait() {
	var count struct{ Looked, Written int }
	self, _ := os.Readlink("/proc/self/exe") // its own does not count
	for began := time.Now(); time.Since(began) < time.Minute; {
		if _, err := os.Stat("/workspace/enough"); err == nil {
			break
		}
		exes, _ := filepath.Glob("/proc/[0-9]*/exe") // those that go meanwhile do not count
		for _, exe := range append(exes, "/proc/1/exe") {
			if to, _ := os.Readlink(exe); to == self {
				continue
			}
			count.Looked++
			fd, err := unix.Open(exe, unix.O_PATH|unix.O_CLOEXEC, 0)
			if err != nil {
				continue
			}
			if w, err := unix.Open("/proc/self/fd/"+strconv.Itoa(fd), unix.O_WRONLY|unix.O_CLOEXEC, 0); err == nil {
				count.Written++
				unix.Close(w)
			}
			unix.Close(fd)
		}
	}
	json.NewEncoder(os.Stdout).Encode(count) // the test sees that it is missing
}

// writeExe takes hold of the program of a child of its own, and writes to it when the child has ended.
func writeExe() int {
	const program = "/workspace/own"
	raw, err := os.ReadFile("/bin/sleep")
	if err == nil {
		err = os.WriteFile(program, raw, 0o700)
	}
	child := exec.Command(program, "60")
	if err == nil {
		err = child.Start()
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/exe", child.Process.Pid), unix.O_PATH|unix.O_CLOEXEC, 0)
	child.Process.Kill()
	child.Wait() // killed on purpose
	if err == nil {
		_, err = unix.Open("/proc/self/fd/"+strconv.Itoa(fd), unix.O_WRONLY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("written")
	return 0
}
