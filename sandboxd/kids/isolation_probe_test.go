package kids

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// runIsolationProbe is the part of runProbe about limits and writable places.
func runIsolationProbe(name string) int {
	switch name {
	case "crash":
		os.Exit(crash(os.Args[1:]))
	case "huge":
		json.NewEncoder(os.Stdout).Encode(huge()) // the test sees that it is missing
	case "places":
		json.NewEncoder(os.Stdout).Encode(places()) // likewise
	case "exhaust":
		json.NewEncoder(os.Stdout).Encode(exhaust(os.Args[1])) // likewise
	case "read disk":
		took, err := readDisk(os.Args[1], 4<<20)
		fmt.Printf("%d %v\n", took.Milliseconds(), err)
	case "execute":
		json.NewEncoder(os.Stdout).Encode(execute(os.Args[1:])) // likewise
	default:
		return runEscapeProbe(name)
	}
	return 0
}

// crash lets a child abort, after an attempt to set the limit of core dumps to zero, and exits with 1 where the
// kernel made a dump.
func crash(args []string) int {
	if len(args) > 0 {
		if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
			fmt.Println(err)
			return 2
		}
	}
	child := exec.Command("/bin/sh", "-c", "kill -ABRT $$")
	child.Run() // it is killed
	ws := child.ProcessState.Sys().(syscall.WaitStatus)
	if ws.Signal() != syscall.SIGABRT {
		return 3
	}
	var core unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_CORE, &core); err != nil {
		return 4
	}
	fmt.Println(core.Cur, core.Max, ws.CoreDump())
	return 0
}

// huge asks for huge pages in each way that there is.
func huge() map[string]string {
	out := map[string]string{}
	const size, shmHugeTLB = 2 << 20, 0o4000
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_HUGETLB)
	out["mmap"] = name(err)
	if err == nil {
		mem[0] = 1
		unix.Munmap(mem)
	}
	fd, err := unix.MemfdCreate("huge", unix.MFD_HUGETLB)
	out["memfd_create"] = name(err)
	if err == nil {
		unix.Close(fd)
	}
	id, err := unix.SysvShmGet(unix.IPC_PRIVATE, size, shmHugeTLB|unix.IPC_CREAT|0o600)
	out["shmget"] = name(err)
	if err == nil {
		unix.SysvShmCtl(id, unix.IPC_RMID, nil)
	}
	return out
}

// place is a mount to which the caller can write.
type place struct{ Bytes, Files uint64 }

// places tries every mount.
func places() map[string]place {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	defer f.Close() // only read
	out := map[string]place{}
	for lines := bufio.NewScanner(f); lines.Scan(); {
		dir := strings.Fields(lines.Text())[4]
		tmp, err := os.CreateTemp(dir, "x")
		if err != nil {
			continue
		}
		tmp.Close()           // empty
		os.Remove(tmp.Name()) // the test's own
		var fs unix.Statfs_t
		if unix.Statfs(dir, &fs) == nil {
			out[dir] = place{fs.Blocks * uint64(fs.Bsize), fs.Files}
		}
	}
	return out
}

// exhaust takes all that dir gives, in each way that there is, and says how each ended.
func exhaust(dir string) map[string]string {
	out := map[string]string{}
	f, err := os.Create(filepath.Join(dir, "big"))
	if err == nil {
		err = unix.Fallocate(int(f.Fd()), 0, 0, 500<<30)
		f.Close() // full anyway
		os.Remove(f.Name())
	}
	out["fallocate"] = name(err)
	n, err := 0, error(nil)
	for ; err == nil && n < 1_000_000; n++ {
		err = unix.Mknod(filepath.Join(dir, "f"+strconv.Itoa(n)), unix.S_IFREG|0o600, 0)
	}
	out["empty files"], out["how many"] = name(err), strconv.Itoa(n)
	for i := range n {
		os.Remove(filepath.Join(dir, "f"+strconv.Itoa(i)))
	}
	out["nesting"] = name(nest(dir, 1_000_000))
	return out
}

// nest makes a directory in a directory, n deep, unless that fails.
func nest(dir string, n int) error {
	at, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	for i := 0; err == nil && i < n; i++ {
		if err = unix.Mkdirat(at, "d", 0o700); err != nil {
			break
		}
		var next int
		next, err = unix.Openat(at, "d", unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		unix.Close(at)
		at = next
	}
	return err
}

// readDisk reads the file's first n bytes past the page cache.
func readDisk(path string, n int) (time.Duration, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	const chunk = 256 << 10
	buf := make([]byte, chunk+4096)
	buf = buf[4096-int(uintptr(unsafe.Pointer(&buf[0]))%4096):][:chunk] // O_DIRECT wants it aligned
	began := time.Now()
	for at := 0; at < n; at += chunk {
		if got, err := unix.Pread(fd, buf, int64(at)); err != nil || got != chunk {
			return 0, errors.Join(err, fmt.Errorf("%d bytes", got))
		}
	}
	return time.Since(began), nil
}

// execute copies the probe to each directory and into a file in memory, and starts it there.
func execute(dirs []string) map[string]string {
	out := map[string]string{}
	self, err := os.ReadFile("/bin/true")
	if err != nil {
		return nil
	}
	for _, dir := range dirs {
		path := filepath.Join(dir, "program")
		err := os.WriteFile(path, self, 0o700)
		if err == nil {
			err = exec.Command(path).Run()
			os.Remove(path) // the test's own
		}
		out[dir] = name(err)
	}
	fd, err := unix.MemfdCreate("program", 0)
	if err == nil {
		f := os.NewFile(uintptr(fd), "program")
		defer f.Close() // gone with the process
		if _, err = io.Copy(f, bytes.NewReader(self)); err == nil {
			err = exec.Command("/proc/self/fd/" + strconv.Itoa(fd)).Run()
		}
	}
	out["memory"] = name(err)
	return out
}
