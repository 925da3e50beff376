package runtime

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// disk is a whole block device; the kernel throttles no partition of one.
type disk struct{ major, minor int64 }

// bytesPerIO: a kid that reads in small pieces is held to fewer bytes than its rate.
const bytesPerIO = 16 << 10

// disks returns the machine's block devices that hold anything.
func disks() ([]disk, error) {
	const dir = "/sys/block"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("listing the disks whose use to limit: %w", err)
	}
	var out []disk
	for _, e := range entries {
		if size, err := os.ReadFile(filepath.Join(dir, e.Name(), "size")); err != nil || strings.TrimSpace(string(size)) == "0" {
			continue // empty, or pulled out just now
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name(), "dev"))
		if err != nil {
			continue // as above
		}
		var d disk
		if _, err := fmt.Sscanf(string(text), "%d:%d", &d.major, &d.minor); err != nil {
			return nil, fmt.Errorf("reading the number %q of disk %s: %w", text, e.Name(), err)
		}
		out = append(out, d)
	}
	return out, nil
}

// throttle limits reading from, and writing to, each of the disks to rate bytes a second.
func throttle(disks []disk, rate uint64) *specs.LinuxBlockIO {
	var out specs.LinuxBlockIO
	for _, d := range disks {
		bytes, calls := specs.LinuxThrottleDevice{Rate: rate}, specs.LinuxThrottleDevice{Rate: max(rate/bytesPerIO, 1)}
		bytes.Major, bytes.Minor, calls.Major, calls.Minor = d.major, d.minor, d.major, d.minor
		out.ThrottleReadBpsDevice = append(out.ThrottleReadBpsDevice, bytes)
		out.ThrottleWriteBpsDevice = append(out.ThrottleWriteBpsDevice, bytes)
		out.ThrottleReadIOPSDevice = append(out.ThrottleReadIOPSDevice, calls)
		out.ThrottleWriteIOPSDevice = append(out.ThrottleWriteIOPSDevice, calls)
	}
	return &out
}
