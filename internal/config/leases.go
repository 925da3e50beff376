package config

import (
	"time"

	"tagout/internal/lease"
	"tagout/internal/yamlx"
)

// leasesFile is the form of the leases section. An empty text means the default.
type leasesFile struct {
	Kids     string `yaml:"kids,omitempty"`
	Kernel   string `yaml:"kernel,omitempty"`
	Watchdog string `yaml:"watchdog,omitempty"`
	Absent   string `yaml:"absent,omitempty"`
}

var leaseKeys = []yamlx.Key{
	{Name: "kids", Example: "30s"},
	{Name: "kernel", Example: "5s"},
	{Name: "watchdog", Example: "5s"},
	{Name: "absent", Example: "20s"},
}

// readLeases leaves what is not written at zero, which means the default.
func readLeases(v yamlx.Value) lease.Terms {
	m, _ := v.Map(leaseKeys...)
	read := func(key string, preset time.Duration, b lease.Bound) time.Duration {
		if !m.Has(key) {
			return 0
		}
		return readDuration(m.Get(key), key, preset, b.Least, b.Most)
	}
	return lease.Terms{
		Kids:     read("kids", lease.Default.Kids, lease.KidsBound),
		Kernel:   read("kernel", lease.Default.Kernel, lease.KernelBound),
		Watchdog: read("watchdog", lease.Default.Watchdog, lease.WatchdogBound),
		Absent:   read("absent", lease.Default.Absent, lease.AbsentBound),
	}
}

func writeLeases(t lease.Terms) leasesFile {
	text := func(d time.Duration) string {
		if d == 0 {
			return ""
		}
		return d.String()
	}
	return leasesFile{Kids: text(t.Kids), Kernel: text(t.Kernel), Watchdog: text(t.Watchdog), Absent: text(t.Absent)}
}
