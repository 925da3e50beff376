package runtime

import (
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// typing is a terminal that a command would read: run types, reader reads, with a deadline.
func typing(t *testing.T) (run *Running, reader *os.File) {
	t.Helper()
	master, slave, err := newTerminal(os.Getuid(), Size{24, 80})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeFiles(master, slave) })
	fd, err := unix.FcntlInt(slave.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		t.Fatal(err)
	}
	reader = os.NewFile(uintptr(fd), "reader")
	t.Cleanup(func() { reader.Close() })
	if err := reader.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return &Running{Stdin: master, Stdout: master}, reader
}

func typeIn(t *testing.T, run *Running, pieces ...string) {
	t.Helper()
	for _, p := range pieces {
		if _, err := run.Write([]byte(p)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestEndOfATerminalsInput: a reader gets all that was typed and then the end, also behind an unfinished line; where the
// line was finished it is the end for that reader alone.
func TestEndOfATerminalsInput(t *testing.T) {
	for name, tc := range map[string]struct {
		typed   []string
		want    string
		adopted bool
		twice   bool // the next reader finds an end, too
		change  func(*unix.Termios)
	}{
		"nothing":             {},
		"a line":              {typed: []string{"one\n"}, want: "one\n"},
		"unfinished":          {typed: []string{"one"}, want: "one"},
		"in pieces":           {typed: []string{"one\ntw", "o"}, want: "one\ntwo"},
		"finished by Enter":   {typed: []string{"one", "\r"}, want: "one\n"},
		"Enter is no newline": {typed: []string{"one\r"}, want: "one\r", change: func(m *unix.Termios) { m.Iflag &^= unix.ICRNL }},
		"newline is Enter":    {typed: []string{"one\n"}, want: "one\r", change: func(m *unix.Termios) { m.Iflag = m.Iflag&^unix.ICRNL | unix.INLCR }},
		"another character":   {typed: []string{"one"}, want: "one", change: func(m *unix.Termios) { m.Cc[unix.VEOF] = 'E' & 0x1f }},
		"adopted":             {adopted: true, twice: true},
		"adopted and typed":   {typed: []string{"one\n"}, want: "one\n", adopted: true},
	} {
		t.Run(name, func(t *testing.T) {
			run, reader := typing(t)
			run.adopted = tc.adopted
			if tc.change != nil {
				setMode(t, reader, tc.change)
			}
			typeIn(t, run, tc.typed...)
			if err := run.EndInput(); err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(reader)
			if err != nil || string(got) != tc.want {
				t.Fatalf("read %q, %v; want %q", got, err, tc.want)
			}
			typeIn(t, run, "next\n\x04")
			n, err := reader.Read(make([]byte, 8))
			if tc.twice != errors.Is(err, io.EOF) || !tc.twice && n != len("next\n") {
				t.Errorf("the next reader got %d bytes, %v", n, err)
			}
		})
	}
}

func setMode(t *testing.T, tty *os.File, change func(*unix.Termios)) {
	t.Helper()
	mode, err := modeOf(tty)
	if err != nil {
		t.Fatal(err)
	}
	change(mode)
	raw, err := tty.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	ctlErr := raw.Control(func(fd uintptr) { err = unix.IoctlSetTermios(int(fd), unix.TCSETS, mode) })
	if err := errors.Join(ctlErr, err); err != nil {
		t.Fatal(err)
	}
}

// TestOneEndOnlyHandsOverALine is the control: behind an unfinished line the character alone is no end.
func TestOneEndOnlyHandsOverALine(t *testing.T) {
	run, reader := typing(t)
	typeIn(t, run, "one", "\x04")
	buf := make([]byte, 8)
	n, err := reader.Read(buf)
	if err != nil || string(buf[:n]) != "one" {
		t.Fatalf("read %q, %v", buf[:n], err)
	}
	reader.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if n, err := reader.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%d bytes, %v, where nothing ends the reader's waiting", n, err)
	}
}

// TestRawTerminalGetsOneCharacter: a command that takes each character by itself knows no lines, and gets one.
func TestRawTerminalGetsOneCharacter(t *testing.T) {
	run, reader := typing(t)
	setMode(t, reader, func(m *unix.Termios) { m.Lflag &^= unix.ICANON })
	typeIn(t, run, "one")
	if err := run.EndInput(); err != nil {
		t.Fatal(err)
	}
	typeIn(t, run, "\n")
	buf := make([]byte, 5)
	if _, err := io.ReadFull(reader, buf); err != nil || string(buf) != "one\x04\n" {
		t.Errorf("read %q, %v", buf, err)
	}
}
