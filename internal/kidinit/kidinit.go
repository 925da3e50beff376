// Package kidinit holds what sandboxd and kid-init say to each other, and nothing else: it is all that the two share.
//
// kid-init inherits one end of a socket pair (MasterFD). Over it comes an Order with one descriptor: the child's end
// of another socket pair. kid-init forks a child for it. The child says Hello, by which the kernel tells the other
// side its pid (SCM_CREDENTIALS, unix(7)), and waits. When it has been put into its cgroup it gets a Command with four
// descriptors: the Command's text and the standard streams. It becomes the command, by which its end closes, or it
// answers a Failure. When a child has ended, kid-init sends a Report.
//
// All of it are SOCK_SEQPACKET messages of a fixed size, in the machine's own byte order: both ends run on it.
package kidinit

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
)

// MasterFD is the descriptor of kid-init's own socket.
const MasterFD = 3

// Hello is the only byte of a child's first message.
const Hello = 'h'

// Sizes of the messages, in bytes.
const (
	OrderSize   = 8
	ReportSize  = 48
	CommandSize = 48
	FailureSize = 8
)

// MaxText bounds the text of a command, in bytes.
const MaxText = 8 << 20

// Kinds of a Report.
const (
	Ended   = 1 // Status is a wait status (wait(2))
	Refused = 2 // no child was made; Status is an errno
)

// Report says how the child of the order with this id ended.
type Report struct {
	ID     uint64
	Kind   uint32
	Status uint32
	User   uint64 // microseconds
	System uint64 // microseconds
	MaxRSS uint64 // KiB
	_      uint64
}

// Command describes a Text.
type Command struct {
	Size  uint64 // bytes of the text, its table included
	Words uint32 // entries of its table
	Paths uint32 // index in the table of the first path to try, NULL behind the last
	Argv  uint32 // index of the first argument
	Env   uint32 // index of the first variable
	UID   uint32 // in the kid's user namespace; the gid is the same
	Umask uint32
	TTY   uint32 // 1: standard input is a terminal and becomes the controlling one
	_     uint32
	Caps  uint64 // capabilities that it keeps, a bit each (capabilities(7)); kid-init must have them
}

// Stages of a Failure.
const (
	StageSetup = 1 // the child could not be made what it should be
	StageDir   = 2 // the directory cannot be entered
	StageExec  = 3 // the program cannot be run
)

// Failure says why a child did not become its command.
type Failure struct {
	Stage uint32
	Errno uint32
}

var order = binary.NativeEndian

// EncodeOrder returns the message for the order with this id.
func EncodeOrder(id uint64) []byte { return order.AppendUint64(nil, id) }

// DecodeReport reads a message. Everything in it is what kid-init says.
func DecodeReport(b []byte) (Report, error) {
	if len(b) != ReportSize {
		return Report{}, fmt.Errorf("kid-init sent %d bytes instead of a report of %d", len(b), ReportSize)
	}
	r := Report{
		ID: order.Uint64(b), Kind: order.Uint32(b[8:]), Status: order.Uint32(b[12:]),
		User: order.Uint64(b[16:]), System: order.Uint64(b[24:]), MaxRSS: order.Uint64(b[32:]),
	}
	if r.Kind != Ended && r.Kind != Refused {
		return Report{}, fmt.Errorf("kid-init sent a report of the kind %d, which does not exist", r.Kind)
	}
	return r, nil
}

// EncodeCommand returns the message for c.
func EncodeCommand(c Command) []byte {
	b := order.AppendUint64(make([]byte, 0, CommandSize), c.Size)
	for _, n := range []uint32{c.Words, c.Paths, c.Argv, c.Env, c.UID, c.Umask, c.TTY, 0} {
		b = order.AppendUint32(b, n)
	}
	return order.AppendUint64(b, c.Caps)
}

// DecodeFailure reads a child's answer.
func DecodeFailure(b []byte) (Failure, error) {
	if len(b) != FailureSize {
		return Failure{}, fmt.Errorf("a command that starts sent %d bytes instead of %d", len(b), FailureSize)
	}
	return Failure{Stage: order.Uint32(b), Errno: order.Uint32(b[4:])}, nil
}

// Text lays out what a child needs to become a command: a table of offsets, 0 where NULL is meant, and behind it the
// strings, each with its NUL. A child that has mapped it only adds where to every entry that is not 0, and has what
// execve(2) wants. The strings hold no NUL; that is the caller's to see to.
func Text(dir string, paths, argv, env []string) (Command, []byte, error) {
	words := 1 + len(paths) + 1 + len(argv) + 1 + len(env) + 1
	all := append(append(append([]string{dir}, paths...), argv...), env...)
	size := 8 * words
	for _, s := range all {
		size += len(s) + 1
	}
	if size > MaxText || words > math.MaxUint32 {
		return Command{}, nil, fmt.Errorf("the command with its arguments and its environment has %d bytes: %d are the most", size, MaxText)
	}
	text := make([]byte, 8*words, size)
	at := 0
	add := func(list ...string) {
		for _, s := range list {
			order.PutUint64(text[8*at:], uint64(len(text)))
			text = append(append(text, s...), 0)
			at++
		}
	}
	c := Command{Size: uint64(size), Words: uint32(words), Paths: 1}
	add(dir)
	add(paths...)
	at++
	c.Argv = uint32(at)
	add(argv...)
	at++
	c.Env = uint32(at)
	add(env...)
	return c, text, nil
}

// defaultPath is searched where the environment has no PATH.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Paths lists where a program of that name may lie, in the order in which they are to be tried. Directories of PATH
// that are not absolute are left out: the current one is whatever the kid made of it.
func Paths(program string, env []string) []string {
	if strings.Contains(program, "/") {
		return []string{program}
	}
	path := defaultPath
	for _, e := range env {
		if value, ok := strings.CutPrefix(e, "PATH="); ok {
			path = value
		}
	}
	var out []string
	for dir := range strings.SplitSeq(path, ":") {
		if strings.HasPrefix(dir, "/") {
			out = append(out, dir+"/"+program)
		}
	}
	return out
}
