package box

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
)

// process is one process of the instance, and how it was found.
type process struct {
	pid  int
	text string
}

// end kills the processes, all of them first, and returns when they have ended: one that was killed may wait for a
// processor, and for as long as it does it is there, with its command line. When ctx ends first, that is an error.
func end(ctx context.Context, procs []process) error {
	var fds []int
	defer func() {
		for _, fd := range fds {
			unix.Close(fd) // nothing was written
		}
	}()
	for _, p := range procs {
		fd, err := p.kill()
		if err != nil {
			return err
		}
		if fd >= 0 {
			fds = append(fds, fd)
		}
	}
	for _, fd := range fds {
		if err := cgroup.WaitExit(ctx, fd); err != nil {
			return fmt.Errorf("waiting for killed processes to end: %w", err)
		}
	}
	return nil
}

// kill kills it. A pidfd (pidfd_open(2)) names the process that was looked at, even where its pid was given
// to another one since. The caller closes it; it is -1 where the process is gone already.
func (p process) kill() (fd int, err error) {
	fd, err = unix.PidfdOpen(p.pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return -1, nil
	}
	if err != nil {
		return -1, fmt.Errorf("opening process %d: %w", p.pid, err)
	}
	if now := commandLine(p.pid); now != p.text {
		unix.Close(fd) // nothing was written
		return -1, nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		unix.Close(fd) // as above
		return -1, fmt.Errorf("killing process %d: %w", p.pid, err)
	}
	return fd, nil
}

// strays lists the processes of the instance that its v2 cgroup does not hold.
func (f found) strays() []process {
	seen := map[int]bool{}
	var out []process
	for _, c := range []string{"pids", "memory", "cpu", "freezer", "devices"} {
		dir := f.layout.V1(c, f.inst.CgroupRel())
		if dir == "" {
			continue
		}
		pids, err := cgroup.Procs(dir)
		if err != nil {
			continue // what cannot be read here keeps its cgroup busy, which the cgroups' removal reports
		}
		for _, pid := range pids {
			if !seen[pid] {
				seen[pid] = true
				out = append(out, process{pid, commandLine(pid)})
			}
		}
	}
	for _, p := range byCommand(f.inst.Name()) {
		name := filepath.Base(strings.SplitN(p.text, " ", 2)[0])
		if !seen[p.pid] && slices.Contains(instance.Daemons(), name) {
			out = append(out, p)
		}
	}
	return out
}

// byCommand lists the processes whose command line names the instance, this one and its ancestors left out:
// they are the cleanup itself.
func byCommand(name string) []process {
	us := ancestors()
	dirs, _ := filepath.Glob("/proc/[0-9]*") // the pattern is right
	var out []process
	for _, d := range dirs {
		pid, err := strconv.Atoi(filepath.Base(d))
		if err != nil || us[pid] {
			continue
		}
		text := commandLine(pid)
		args := strings.Fields(text)
		for i, a := range args {
			if a == "--instance="+name || a == "-instance="+name ||
				(a == name && i > 0 && (args[i-1] == "--instance" || args[i-1] == "-instance")) {
				out = append(out, process{pid, text})
				break
			}
		}
	}
	return out
}

// commandLine returns the arguments with spaces in between, "" for one that is gone or a zombie.
func commandLine(pid int) string {
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
	if err != nil {
		return ""
	}
	return string(bytes.ReplaceAll(bytes.TrimRight(raw, "\x00"), []byte{0}, []byte{' '}))
}

func ancestors() map[int]bool {
	out := map[int]bool{}
	for pid := os.Getpid(); pid > 0 && !out[pid]; {
		out[pid] = true
		raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
		if err != nil {
			break
		}
		// After the command's name, which may hold anything: state, parent.
		rest := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
		if len(rest) < 2 {
			break
		}
		if pid, err = strconv.Atoi(rest[1]); err != nil {
			break
		}
	}
	return out
}
