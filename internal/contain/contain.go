// Package contain tries to get out of a kid: fifteen classes of escape and discovery, each by real attempts at
// the real thing, none of which does harm where it succeeds. It promises that what it calls reached was reached a
// moment ago by this process. It does not promise that nothing else can be reached: a new hole in the kernel is in
// no list.
package contain

import (
	"errors"
	"strings"

	"golang.org/x/sys/unix"
)

// Target is what there is to reach outside. Whoever asks for the attempts has made it; a kid knows nothing of it
// by itself, so being told only makes it stronger.
type Target struct {
	Dir       string `json:"dir"`       // writable, where it runs
	Marker    string `json:"marker"`    // a file outside that its user could read, and nobody needs
	PID       int    `json:"pid"`       // a process outside, of the same machine
	Neighbour int    `json:"neighbour"` // a process in another kid
	File      string `json:"file"`      // a file in that kid, by its path there
	Socket    string `json:"socket"`    // of somebody who listens outside, by path
	Abstract  string `json:"abstract"`  // the same, by abstract name, without the @
	Env       string `json:"env"`       // a variable of the outside's environment, NAME=VALUE
	Host      string `json:"host"`      // the machine's own name
	Disk      string `json:"disk"`      // a block device of the machine's, below /dev
	Device    uint64 `json:"device"`    // ProgramDevice outside
}

// Result is the outcome of one attempt.
type Result struct {
	Class   string `json:"class"`
	Attempt string `json:"attempt"`
	Reached bool   `json:"reached"`
	Said    string `json:"said,omitempty"` // the refusal
}

// attempt returns nil where it reached what it was after, and otherwise what refused it.
type attempt struct {
	class, name string
	try         func(Target) error
}

func attempts() []attempt {
	var out []attempt
	for _, group := range [][]attempt{privileges(), sockets(), mounts(), kernel(), processes(), devices(), keyrings(), descriptors(), namespaces(), discovery(), metadata()} {
		out = append(out, group...)
	}
	return out
}

// Run makes all attempts, one after the other.
func Run(t Target) []Result {
	var out []Result
	for _, a := range attempts() {
		r := Result{Class: a.class, Attempt: a.name}
		err := a.try(t)
		if r.Reached = err == nil; !r.Reached {
			r.Said = strings.Join(strings.Fields(err.Error()), " ")
		}
		out = append(out, r)
	}
	return out
}

// Reached lists what was reached, for a message; empty where nothing was.
func Reached(results []Result) string {
	var out []string
	for _, r := range results {
		if r.Reached {
			out = append(out, r.Class+": "+r.Attempt)
		}
	}
	return strings.Join(out, "; ")
}

// unless returns nil where err is one of those that only somebody is told whom the kernel let in: the attempts
// hand it nonsense on purpose, so that nothing happens.
func unless(err error, admitted ...unix.Errno) error {
	for _, errno := range admitted {
		if errors.Is(err, errno) {
			return nil
		}
	}
	return err
}

// call is a system call that is given nonsense.
func call(nr uintptr, args [4]uintptr, admitted ...unix.Errno) error {
	_, _, errno := unix.Syscall6(nr, args[0], args[1], args[2], args[3], 0, 0)
	if errno == 0 {
		return nil
	}
	return unless(errno, admitted...)
}

// opens opens path and closes it again.
func opens(path string, flags int) error {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0o600)
	if err == nil {
		unix.Close(fd)
	}
	return err
}

// any returns nil where one of the attempts succeeds, and otherwise the last refusal.
func anyOf[T any](all []T, try func(T) error) error {
	err := errors.New("there is none")
	for _, one := range all {
		if err = try(one); err == nil {
			return nil
		}
	}
	return err
}

const none = ^uintptr(0) // no file descriptor
