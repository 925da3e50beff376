package files

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Why something is not carried in or out of a kid.
var (
	ErrPath  = errors.New("the path leads through a link or out of the kid's writable place")
	ErrKind  = errors.New("it is neither a regular file nor a directory")
	ErrLarge = errors.New("it is more than is carried")
	ErrGone  = errors.New("the kid's processes are gone")
)

// Bounds of what is carried at once.
const (
	MaxEntries = 100_000 // files and directories of one archive
	MaxDepth   = 64      // levels of directories
)

// Tree is one writable place of a kid, open. Everything in it was perhaps put there by a hostile kid that goes on
// changing it: each path is resolved by the kernel beneath the place, without links and without other mounts, and with
// the rights of the kid's own user, so that even a way out would lead to nothing.
type Tree struct {
	root  *os.File
	owner Owner
	size  int64 // bytes that the place can hold
}

// OpenHost opens a place through the host's own mount of it.
func OpenHost(dir string, owner Owner) (*Tree, error) {
	root, err := os.OpenFile(dir, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("opening the kid's files: %w", err)
	}
	return newTree(root, owner)
}

// OpenInside opens the place that is mounted at inside, an absolute path, in the mount namespace of the process pid.
// userNS is the pinned user namespace that the process must be in: a pid alone may have become somebody else's.
func OpenInside(pid int, userNS, inside string, owner Owner) (*Tree, error) {
	fail := func(err error) (*Tree, error) { return nil, fmt.Errorf("opening %s in the kid: %w", inside, err) }
	proc, err := unix.Open("/proc/"+strconv.Itoa(pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fail(fmt.Errorf("%w: %w", ErrGone, err))
	}
	defer unix.Close(proc) // only looked through; from here on it is this process or nobody
	top, err := unix.Openat(proc, "root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fail(fmt.Errorf("%w: %w", ErrGone, err))
	}
	defer unix.Close(top) // as above
	var have, want unix.Stat_t
	if err := unix.Fstatat(proc, "ns/user", &have, 0); err != nil {
		return fail(fmt.Errorf("%w: %w", ErrGone, err))
	}
	if err := unix.Stat(userNS, &want); err != nil {
		return fail(err)
	}
	if have.Dev != want.Dev || have.Ino != want.Ino {
		return fail(fmt.Errorf("%w: pid %d is another process by now", ErrGone, pid))
	}
	how := &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS}
	fd, err := unix.Openat2(top, strings.TrimPrefix(inside, "/"), how) // it is a mount: that one is crossed
	if err != nil {
		return fail(err)
	}
	return newTree(os.NewFile(uintptr(fd), inside), owner)
}

// newTree takes root over. Only a file system of the kid's own, with a size of its own, is a place.
func newTree(root *os.File, owner Owner) (*Tree, error) {
	var st unix.Statx_t
	var vfs unix.Statfs_t
	err := errors.Join(
		unix.Statx(int(root.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_BASIC_STATS, &st),
		unix.Fstatfs(int(root.Fd()), &vfs),
	)
	if err == nil && (st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 || vfs.Type != unix.TMPFS_MAGIC) {
		err = errors.New("it is not the place that was mounted there")
	}
	if err != nil {
		root.Close() // only read
		return nil, fmt.Errorf("opening %s: %w", root.Name(), err)
	}
	return &Tree{root: root, owner: owner, size: int64(vfs.Blocks) * vfs.Bsize}, nil // a tmpfs is far smaller than an int64
}

// Close closes the place.
func (t *Tree) Close() { t.root.Close() } // only a directory

// Size is how many bytes the place can hold.
func (t *Tree) Size() int64 { return t.size }

// asOwner calls fn on a thread that has the file rights of the kid's user and none of root's. The thread ends with
// the call.
func (t *Tree) asOwner(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: nobody else may get this thread
		if err := become(t.owner); err != nil {
			done <- fmt.Errorf("taking the kid's user on: %w", err)
			return
		}
		done <- fn()
	}()
	return <-done
}

// become changes the file rights of this thread alone (setfsuid(2)); the kernel then takes root's rights over files
// off it.
func become(o Owner) error {
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); errno != 0 {
		return errno
	}
	for _, id := range []struct {
		call uintptr
		want int
	}{{unix.SYS_SETFSGID, o.GID}, {unix.SYS_SETFSUID, o.UID}} {
		unix.RawSyscall(id.call, uintptr(id.want), 0, 0) // never fails; the second call returns what is in force
		if now, _, _ := unix.RawSyscall(id.call, uintptr(id.want), 0, 0); int(now) != id.want {
			return unix.EPERM
		}
	}
	return nil
}

// Rel checks a path below the place: it must say plainly where it leads. "." is the place itself.
func Rel(rel string) (string, error) {
	clean := path.Clean("/" + rel)[1:]
	switch {
	case strings.ContainsRune(rel, 0) || len(rel) >= unix.PathMax:
		return "", fmt.Errorf("%w: it cannot be a path", ErrPath)
	case strings.Contains("/"+rel+"/", "/../"):
		return "", fmt.Errorf("%w: it goes up (..) on its way", ErrPath)
	case strings.Count(clean, "/") >= MaxDepth:
		return "", fmt.Errorf("%w: more than %d levels deep", ErrLarge, MaxDepth)
	case clean == "":
		return ".", nil
	}
	return clean, nil
}

// at opens rel below dir as the thread's user.
func at(dir *os.File, rel string, flags int, perm uint64) (*os.File, error) {
	f, err := open(dir, rel, flags|unix.O_NOCTTY, perm, beneath)
	switch {
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV), errors.Is(err, unix.EAGAIN):
		return nil, fmt.Errorf("%w: %w", ErrPath, err)
	case errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENOTDIR): // a socket, a device, a file on the way
		return nil, fmt.Errorf("%w: %w", ErrKind, err)
	}
	return f, err
}

// regular opens a regular file for reading. A FIFO does not hold it up (O_NONBLOCK).
func regular(dir *os.File, rel string) (*os.File, fs.FileInfo, error) {
	f, err := at(dir, rel, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = ErrKind
	}
	if err != nil {
		f.Close() // only read
		return nil, nil, err
	}
	return f, info, nil
}
