package bootclock

import (
	"os"
	"strings"
)

// Boot returns the kernel's name for this boot (random(4)): Now starts again with the next one.
func Boot() (string, error) {
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(raw)), err
}
