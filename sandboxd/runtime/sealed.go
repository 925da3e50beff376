package runtime

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"

	"golang.org/x/sys/unix"
)

// sealed is a program's copy in memory that nobody can write to any more, root included (memfd_create(2), F_ADD_SEALS in
// fcntl(2)). runc lets no container reach its own program where it could be overwritten (CVE-2019-5736): it moves itself
// into such a copy, or a mount in its place, for each container, and starts again from there. Started from a sealed copy
// it has nothing to do. All containers share the one.
type sealed struct {
	name string // of the program, looked up in PATH

	mu   sync.Mutex
	from unix.Stat_t // guarded by mu; the file that was copied
	copy *os.File    // guarded by mu; nil: there is none yet. Never closed: a process may be about to be started from it
}

// seals are those that runc looks for, and no other: it takes a file with more for an open one.
const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE

// lowestCopy is above the descriptors that a new process is given: its own copy of this one must be there when it starts.
const lowestCopy = 64

// path returns where the program is to be started from: the copy, or the program's own file where this kernel has or
// allows no such copies, or where it is a script, which could not be read by its interpreter. A program that was replaced
// since is copied again.
func (s *sealed) path() (string, error) {
	file, err := exec.LookPath(s.name)
	if err != nil {
		return "", fmt.Errorf("looking for %s: %w", s.name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var now unix.Stat_t
	if err := unix.Stat(file, &now); err != nil {
		return "", fmt.Errorf("looking at %s: %w", file, err)
	}
	if s.copy == nil || !sameFile(s.from, now) {
		made, err := seal(file)
		if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EACCES) || errors.Is(err, errScript) { // vm.memfd_noexec=2
			return file, nil
		}
		if err != nil {
			return "", fmt.Errorf("copying %s into memory: %w", file, err)
		}
		s.from, s.copy = now, made
	}
	return fmt.Sprintf("/proc/self/fd/%d", s.copy.Fd()), nil
}

func sameFile(a, b unix.Stat_t) bool {
	return a.Dev == b.Dev && a.Ino == b.Ino && a.Size == b.Size && a.Mtim == b.Mtim && a.Ctim == b.Ctim
}

var errScript = errors.New("it is a script")

// seal returns a sealed copy of the file.
func seal(file string) (*os.File, error) {
	from, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer from.Close() // only read
	head := make([]byte, 2)
	if n, _ := from.ReadAt(head, 0); string(head[:n]) == "#!" { // what cannot be read cannot be copied either
		return nil, errScript
	}
	fd, err := unix.MemfdCreate("runc", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // a kernel before 6.3
		fd, err = unix.MemfdCreate("runc", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, err
	}
	low := os.NewFile(uintptr(fd), "runc")
	defer low.Close() // its copy stays
	if _, err := io.Copy(low, from); err != nil {
		return nil, err
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return nil, err
	}
	high, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, lowestCopy)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(high), "runc"), nil
}
