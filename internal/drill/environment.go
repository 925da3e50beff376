package drill

import (
	"bufio"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
)

// Environment is where a drill was run. What could not be found out is empty.
type Environment struct {
	Host      string `json:"host"`
	Kernel    string `json:"kernel"`
	Arch      string `json:"arch"`
	CPU       string `json:"cpu"`
	CPUs      int    `json:"cpus"`
	MemoryMiB int64  `json:"memory_mib"`
	Cgroups   string `json:"cgroups"` // v2 or hybrid
	Load      string `json:"load"`    // averages at the start
	Tagout    string `json:"tagout"`
	Go        string `json:"go"`
	Runc      string `json:"runc"`
}

func environment(version string) Environment {
	e := Environment{Arch: runtime.GOARCH, CPUs: runtime.NumCPU(), Tagout: version, Go: runtime.Version(), Cgroups: "v2"}
	e.Host, _ = os.Hostname()
	var uts unix.Utsname
	if unix.Uname(&uts) == nil {
		e.Kernel = unix.ByteSliceToString(uts.Release[:])
	}
	if layout, err := cgroup.Detect(); err == nil && layout.Hybrid() {
		e.Cgroups = "hybrid"
	}
	e.CPU = value("/proc/cpuinfo", "model name", ":")
	kib, _ := strconv.ParseInt(strings.TrimSuffix(value("/proc/meminfo", "MemTotal", ":"), " kB"), 10, 64) // 0: not known
	e.MemoryMiB = kib / 1024
	if raw, err := os.ReadFile("/proc/loadavg"); err == nil {
		e.Load = strings.Join(strings.Fields(string(raw))[:3], " ")
	}
	if out, err := exec.Command("runc", "--version").Output(); err == nil {
		e.Runc, _, _ = strings.Cut(strings.TrimPrefix(string(out), "runc version "), "\n")
	}
	return e
}

// value is what stands behind the first line's key.
func value(file, key, separator string) string {
	f, err := os.Open(file)
	if err != nil {
		return ""
	}
	defer f.Close() // only read
	for sc := bufio.NewScanner(f); sc.Scan(); {
		if k, v, ok := strings.Cut(sc.Text(), separator); ok && strings.TrimSpace(k) == key {
			return strings.TrimSpace(v)
		}
	}
	return ""
}
