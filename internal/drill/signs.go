package drill

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"tagout/internal/cgroup"
)

// process is what /proc says of one process.
type process struct {
	pid     int
	comm    string
	state   byte
	threads int64
	rss     int64 // bytes
}

// readProcess reads /proc/PID/stat (proc_pid_stat(5)); false where the process is gone.
func readProcess(pid int) (process, bool) {
	p, ok := readStat(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	p.pid = pid
	return p, ok
}

func readStat(file string) (process, bool) {
	raw, err := os.ReadFile(file)
	text := string(raw)
	open, end := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if err != nil || open < 0 || end < open {
		return process{}, false
	}
	f := strings.Fields(text[end+1:]) // from the state, the third field, on
	if len(f) < 22 {
		return process{}, false
	}
	p := process{comm: text[open+1 : end], state: f[0][0]}
	p.threads, _ = strconv.ParseInt(f[17], 10, 64) // the kernel writes numbers
	pages, _ := strconv.ParseInt(f[21], 10, 64)    // likewise
	p.rss = pages * int64(os.Getpagesize())
	return p, true
}

// hasThreadIn says whether one of a process's threads is in that state. The state of the process itself is only
// that of its first thread.
func hasThreadIn(state byte, pid int) bool {
	tasks, err := filepath.Glob(filepath.Join("/proc", strconv.Itoa(pid), "task/*/stat"))
	if err != nil {
		return false // the pattern is right
	}
	for _, task := range tasks {
		if t, ok := readStat(task); ok && t.state == state {
			return true
		}
	}
	return false
}

// status reads one line of /proc/PID/status, "" where there is none.
func status(pid int, key string) string {
	raw, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	for line := range strings.Lines(string(raw)) {
		if rest, ok := strings.CutPrefix(line, key+":"); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

// count looks at how much of a sign there is now.
func (o *observer) count(s Sign) int64 {
	switch s.What {
	case "refused", "work", "bulk", "via", "queued":
		return o.countSink(s)
	case "http2":
		return o.net.API.Streamed("agent:"+o.tag, "HTTP/2.0")
	case "uses":
		return int64(o.net.API.Uses.Tally("agent:" + o.tag).Accepted)
	case "replays":
		return int64(o.net.Own.Uses.Tally("accomplice:" + o.tag).Accepted)
	}
	return o.countProcesses(s)
}

func (o *observer) countSink(s Sign) int64 {
	var n, work int64
	for _, st := range o.net.Sink.Streams(o.tag) {
		work = max(work, st.Work)
		switch s.What {
		case "refused":
			n = max(n, st.Refusals)
		case "bulk":
			if st.Kind == "bulk" {
				n += st.Bytes
			}
		case "via", "queued":
			if st.Via == s.Via || s.What == "queued" && st.Kind == "slow" {
				n += st.Bytes
			}
		}
	}
	switch s.What {
	case "work":
		return work
	case "queued":
		return work - n
	}
	return n
}

func (o *observer) countProcesses(s Sign) int64 {
	pids, err := cgroup.Procs(o.cgroup)
	if err != nil {
		return 0
	}
	if s.What == "processes" {
		return int64(len(pids))
	}
	var n int64
	for _, pid := range pids {
		p, ok := readProcess(pid)
		if !ok {
			continue
		}
		switch s.What {
		case "threads":
			n += p.threads
		case "resident":
			n += p.rss
		case "renamed":
			n += one(strings.HasPrefix(p.comm, "kworker/"))
		case "stopped":
			n += one(p.state == 'T')
		case "uninterrupted":
			n += one(hasThreadIn('D', pid))
		case "traced":
			n += one(status(pid, "TracerPid") != "0")
		case "files":
			files, _ := os.ReadDir(filepath.Join("/proc", strconv.Itoa(pid), "fd")) // gone: none
			n = max(n, int64(len(files)))
		}
	}
	if s.What == "resident" {
		n >>= 20
	}
	return n
}

func one(ok bool) int64 {
	if ok {
		return 1
	}
	return 0
}

// family finds processes by the range of uids that belongs to one kid alone.
type family struct{ first, end uint64 }

// kidUIDs begins the kids' ranges of 65,536 uids each (package instance).
const (
	kidUIDs  = 0x70000000
	uidRange = 0x10000
)

// familyOf returns the range that the processes of a cgroup are in; empty where they are not in one.
func familyOf(dir string) family {
	pids, err := cgroup.Procs(dir)
	if err != nil {
		return family{}
	}
	for _, pid := range pids {
		if uid, ok := uidOf(pid); ok && uid >= kidUIDs {
			first := uid &^ (uidRange - 1)
			return family{first, first + uidRange}
		}
	}
	return family{}
}

func uidOf(pid int) (uint64, bool) {
	f := strings.Fields(status(pid, "Uid"))
	if len(f) == 0 {
		return 0, false
	}
	uid, err := strconv.ParseUint(f[0], 10, 64)
	return uid, err == nil
}

// living lists the processes of the family, in whatever cgroup, that are not zombies.
func (f family) living() []process {
	if f.end == 0 {
		return nil
	}
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil // the pattern is right
	}
	var out []process
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			continue
		}
		if uid, ok := uidOf(pid); !ok || uid < f.first || uid >= f.end {
			continue
		}
		if p, ok := readProcess(pid); ok && p.state != 'Z' && p.state != 'X' {
			out = append(out, p)
		}
	}
	return out
}
