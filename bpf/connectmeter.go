package bpf

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// ConnectMeter lets the kernel time the hook that judges every IPv4 connect of the kids, while it is open. That
// slows all BPF programs of the machine down a little: it is for benchmarks.
type ConnectMeter struct {
	hook  *ebpf.Program
	stats io.Closer
}

// NewConnectMeter opens the hook of the installation whose pins lie in pinDir. The caller closes the meter.
func NewConnectMeter(pinDir string) (*ConnectMeter, error) {
	hook, err := ebpf.LoadPinnedProgram(filepath.Join(pinDir, progPin+tagoutProgTagoutConnect4), nil)
	if err != nil {
		return nil, fmt.Errorf("timing the connect hook: opening it: %w", err)
	}
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		hook.Close()
		return nil, fmt.Errorf("timing the connect hook: %w", err)
	}
	return &ConnectMeter{hook: hook, stats: stats}, nil
}

// Read returns how often the hook ran while it was timed, and for how long, since it was loaded.
func (m *ConnectMeter) Read() (calls uint64, spent time.Duration, err error) {
	st, err := m.hook.Stats()
	if err != nil {
		return 0, 0, fmt.Errorf("timing the connect hook: %w", err)
	}
	return st.RunCount, st.Runtime, nil
}

// Close stops the timing.
func (m *ConnectMeter) Close() error { return errors.Join(m.stats.Close(), m.hook.Close()) }
