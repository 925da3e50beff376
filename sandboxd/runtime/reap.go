package runtime

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// processes knows which children have somebody who waits for them.
type processes struct {
	starting sync.RWMutex // held for reading while a command starts and nobody waits for it yet

	mu        sync.Mutex
	ours      map[int]bool // guarded by mu; commands that Running.wait waits for
	abandoned []execGroup  // guarded by mu; cgroups of commands that did not start
}

func (p *processes) add(pid int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ours[pid] = true
}

func (p *processes) remove(pid int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.ours, pid)
}

func (p *processes) has(pid int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ours[pid]
}

// Reap clears away what commands that did not start left behind: dead processes and cgroups. Until then a
// dead process that entered a kid from outside keeps the kid's pid namespace, and with it kid-init, from
// ending (pid_namespaces(7)). Call it now and then.
func (r *Runc) Reap() {
	r.reapStrays()
	r.procs.mu.Lock()
	defer r.procs.mu.Unlock()
	r.procs.abandoned = slices.DeleteFunc(r.procs.abandoned, func(g execGroup) bool { return g.remove() == nil })
}

// reapStrays reaps dead children that nobody waits for: what a runc that was cut short, or a sandboxd that
// was killed, left to this process. It leaves alone what os/exec started: those live in our own pid namespace.
// While a command starts it does nothing; there is a next time.
func (r *Runc) reapStrays() {
	if !r.procs.starting.TryLock() {
		return
	}
	defer r.procs.starting.Unlock()
	tasks, _ := filepath.Glob("/proc/self/task/*/children") // the pattern is good
	for _, file := range tasks {
		raw, err := os.ReadFile(file)
		if err != nil {
			continue // the thread is gone
		}
		for _, field := range strings.Fields(string(raw)) {
			pid, err := strconv.Atoi(field)
			if err == nil && !r.procs.has(pid) && isStray(pid) {
				unix.Wait4(pid, nil, unix.WNOHANG, nil) // somebody was faster
			}
		}
	}
}

// isStray says whether the process is dead and is a container's: it has a pid in a namespace below ours, or
// it is one of the stages through which runc enters one.
func isStray(pid int) bool {
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return false
	}
	dead, inside := false, false
	for line := range strings.Lines(string(raw)) {
		key, value, _ := strings.Cut(line, ":")
		switch key {
		case "State":
			dead = strings.HasPrefix(strings.TrimSpace(value), "Z")
		case "NSpid":
			inside = inside || len(strings.Fields(value)) > 1
		case "Name":
			inside = inside || strings.HasPrefix(strings.TrimSpace(value), "runc:[")
		}
	}
	return dead && inside
}
