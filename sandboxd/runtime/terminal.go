package runtime

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Size is a terminal's, in characters.
type Size struct{ Rows, Cols uint16 }

// newTerminal makes a pseudoterminal on the host: the kid has no devpts through which it could reach others. The slave
// belongs to owner, so that the command may open it again (proc(5)).
func newTerminal(owner int, size Size) (master, slave *os.File, err error) {
	master, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("making a terminal: %w", err)
	}
	raw, err := master.SyscallConn()
	if err == nil {
		ctlErr := raw.Control(func(fd uintptr) { slave, err = openSlave(int(fd)) })
		err = errors.Join(ctlErr, err)
	}
	if err == nil {
		err = errors.Join(slave.Chown(owner, owner), resize(master, size))
	}
	if err != nil {
		closeFiles(master, slave)
		return nil, nil, fmt.Errorf("making a terminal: %w", err)
	}
	return master, slave, nil
}

func openSlave(master int) (*os.File, error) {
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return nil, err
	}
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return nil, errno
	}
	return os.NewFile(fd, "pts"+strconv.Itoa(int(fd))), nil
}

func resize(master *os.File, s Size) error {
	raw, err := master.SyscallConn()
	if err != nil {
		return err
	}
	var setErr error
	err = raw.Control(func(fd uintptr) {
		setErr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: s.Rows, Col: s.Cols})
	})
	return errors.Join(err, setErr)
}

// Resize gives the command's terminal another size; the kernel tells the command (SIGWINCH).
func (r *Running) Resize(rows, cols uint16) error {
	if r.Stderr != nil {
		return errors.New("the command has no terminal")
	}
	return resize(r.Stdout, Size{rows, cols})
}

// Write gives the command input. One goroutine at a time calls it or EndInput.
func (r *Running) Write(b []byte) (int, error) {
	n, err := r.Stdin.Write(b)
	if n > 0 {
		r.typed, r.last = true, b[n-1]
	}
	return n, err
}

// EndInput tells the command that its input has ended. A terminal takes its character for that only at the beginning of a
// line: behind an unfinished one the first hands over the line, and the second is the end.
func (r *Running) EndInput() error {
	if r.Stderr != nil {
		return r.Stdin.Close()
	}
	mode, err := modeOf(r.Stdin)
	if err != nil {
		return fmt.Errorf("ending the input of a terminal: %w", err)
	}
	end := mode.Cc[unix.VEOF]
	out := []byte{end}
	if mode.Lflag&unix.ICANON != 0 && r.unfinished(mode) {
		out = append(out, end)
	}
	_, err = r.Stdin.Write(out)
	return err
}

// unfinished says whether what was typed may end within a line. Who has adopted the command cannot know.
func (r *Running) unfinished(mode *unix.Termios) bool {
	if !r.typed {
		return r.adopted
	}
	newline := r.last == '\n' && mode.Iflag&unix.INLCR == 0 || r.last == '\r' && mode.Iflag&(unix.ICRNL|unix.IGNCR) == unix.ICRNL
	return !newline
}

// modeOf is the mode that the command has put its terminal into (ioctl_tty(2); a master's is the slave's).
func modeOf(master *os.File) (mode *unix.Termios, err error) {
	raw, err := master.SyscallConn()
	if err != nil {
		return nil, err
	}
	ctlErr := raw.Control(func(fd uintptr) { mode, err = unix.IoctlGetTermios(int(fd), unix.TCGETS) })
	return mode, errors.Join(ctlErr, err)
}
