package main

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"tagout/internal/kidinit"
)

// Package syscall brackets its own forks with these: the first blocks all signals and lets the stack not grow, the
// second undoes that in the parent.
//
//go:linkname beforeFork syscall.runtime_BeforeFork
func beforeFork()

//go:linkname afterFork syscall.runtime_AfterFork
func afterFork()

// What a child works with. Only children write to it, each to its own copy.
var (
	command kidinit.Command
	failure kidinit.Failure
	control [96]byte // for as many descriptors as a command comes with
	vector  unix.Iovec
	message unix.Msghdr
	action  [4]uint64 // a struct sigaction that says: the default
	capHead capHeader
	caps    [2]capData
	said    = [1]byte{kidinit.Hello}
)

type capHeader struct {
	version uint32
	pid     int32
}

type capData struct{ effective, permitted, _ uint32 } // none is inheritable

const (
	descriptors = 4  // of a command: text, stdin, stdout, stderr
	lastSignal  = 64 // signal(7)
	lastCap     = 63 // more than there are: asking for others does no harm
	kernelSet   = 8  // bytes of a signal set in the kernel
)

// fork makes a child that speaks with sandboxd over fd and never returns.
//
//go:norace
func fork(fd int) (pid int, errno unix.Errno) {
	beforeFork()
	r, _, e := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if e == 0 && r == 0 {
		become(uintptr(fd))
	}
	afterFork()
	return int(r), e
}

// become is all that a child does. There is one thread, no scheduler and no memory to be had: only raw system calls
// with what is there already, as between fork and exec in package syscall.
//
//go:norace
//go:nosplit
func become(fd uintptr) {
	raw(unix.SYS_SETSID, 0, 0, 0)
	raw(unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(&said)), 1)
	fds := receive(fd)
	if fds == nil {
		exit()
	}
	base, _, errno := unix.RawSyscall6(unix.SYS_MMAP, 0, uintptr(command.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE, uintptr(fds[0]), 0)
	if errno != 0 {
		fail(fd, kidinit.StageSetup, errno)
	}
	for i := uintptr(0); i < uintptr(command.Words); i++ {
		if at := word(base, i); *at != 0 {
			*at += base
		}
	}
	for i := uintptr(0); i < 3; i++ { // none of them is one of these itself: those were open
		raw(unix.SYS_DUP3, uintptr(fds[1+i]), i, 0)
	}
	raw(unix.SYS_UMASK, uintptr(command.Umask), 0, 0)
	for sig := uintptr(1); sig <= lastSignal; sig++ { // kid-init ignores most
		raw(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&action)), 0)
	}
	if command.TTY != 0 {
		if errno := raw(unix.SYS_IOCTL, 0, unix.TIOCSCTTY, 0); errno != 0 {
			fail(fd, kidinit.StageSetup, errno)
		}
	}
	// From here on the kid's other processes may signal this one.
	if errno := dropPrivileges(); errno != 0 {
		fail(fd, kidinit.StageSetup, errno)
	}
	var none uint64
	unix.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&none)), 0, kernelSet, 0, 0)
	if errno := raw(unix.SYS_CHDIR, *word(base, 0), 0, 0); errno != 0 {
		fail(fd, kidinit.StageDir, errno)
	}
	fail(fd, kidinit.StageExec, run(base))
}

// receive waits for the command and returns its descriptors, nil where there will be none.
//
//go:norace
//go:nosplit
func receive(fd uintptr) *[descriptors]int32 {
	vector = unix.Iovec{Base: (*byte)(unsafe.Pointer(&command)), Len: kidinit.CommandSize}
	message = unix.Msghdr{Iov: &vector, Iovlen: 1, Control: &control[0], Controllen: uint64(len(control))}
	n, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, fd, uintptr(unsafe.Pointer(&message)), unix.MSG_CMSG_CLOEXEC)
	head := (*unix.Cmsghdr)(unsafe.Pointer(&control[0]))
	if errno != 0 || n != kidinit.CommandSize || head.Level != unix.SOL_SOCKET || head.Type != unix.SCM_RIGHTS ||
		head.Len != unix.SizeofCmsghdr+4*descriptors {
		return nil
	}
	return (*[descriptors]int32)(unsafe.Pointer(&control[unix.SizeofCmsghdr]))
}

// dropPrivileges takes the command's uid and gives up every capability that it does not keep, in every set. What it
// could do in between is no more than kid-init can.
//
//go:norace
//go:nosplit
func dropPrivileges() unix.Errno {
	uid := uintptr(command.UID)
	if errno := raw(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0); errno != 0 {
		return errno
	}
	for c := uintptr(0); c <= lastCap; c++ {
		if command.Caps&(1<<c) == 0 {
			raw(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0) // EINVAL: there is no such capability
		}
	}
	raw(unix.SYS_PRCTL, unix.PR_SET_KEEPCAPS, 1, 0)
	if errno := raw(unix.SYS_SETRESGID, uid, uid, uid); errno != 0 {
		return errno
	}
	if errno := raw(unix.SYS_SETRESUID, uid, uid, uid); errno != 0 {
		return errno
	}
	if errno := raw(unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0); errno != 0 {
		return errno
	}
	capHead = capHeader{version: unix.LINUX_CAPABILITY_VERSION_3}
	low, high := uint32(command.Caps), uint32(command.Caps>>32) // the two halves
	caps[0] = capData{effective: low, permitted: low}
	caps[1] = capData{effective: high, permitted: high}
	return raw(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&capHead)), uintptr(unsafe.Pointer(&caps)), 0)
}

// run tries one path after another, as execvp(3) does, and returns why none of them was it.
//
//go:norace
//go:nosplit
func run(base uintptr) unix.Errno {
	why := unix.ENOENT
	for i := uintptr(command.Paths); *word(base, i) != 0; i++ {
		errno := raw(unix.SYS_EXECVE, *word(base, i), uintptr(unsafe.Pointer(word(base, uintptr(command.Argv)))), uintptr(unsafe.Pointer(word(base, uintptr(command.Env)))))
		switch errno {
		case unix.ENOENT, unix.ENOTDIR:
		case unix.EACCES:
			why = errno
		default:
			return errno
		}
	}
	return why
}

// word is an entry of the text's table.
//
//go:norace
//go:nosplit
func word(base, i uintptr) *uintptr {
	return (*uintptr)(unsafe.Add(unsafe.Pointer(nil), base+8*i)) // outside of Go's memory
}

//go:norace
//go:nosplit
func raw(call, a, b, c uintptr) unix.Errno {
	_, _, errno := unix.RawSyscall6(call, a, b, c, kernelArg(call), 0, 0)
	return errno
}

// kernelArg is the fourth argument of the one call that needs it.
//
//go:norace
//go:nosplit
func kernelArg(call uintptr) uintptr {
	if call == unix.SYS_RT_SIGACTION {
		return kernelSet
	}
	return 0
}

//go:norace
//go:nosplit
func fail(fd, stage uintptr, errno unix.Errno) {
	failure = kidinit.Failure{Stage: uint32(stage), Errno: uint32(errno)} // small
	raw(unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(&failure)), kidinit.FailureSize)
	exit()
}

//go:norace
//go:nosplit
func exit() {
	for {
		raw(unix.SYS_EXIT_GROUP, 127, 0, 0)
	}
}
