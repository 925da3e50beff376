package netfw

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// lockFile serialises the instances of one machine: each looks at the shared built-in chains and then
// changes them, which is more than one iptables command and its own lock.
const lockFile = "/run/tagout/.firewall.lock"

// lockLimit bounds the wait for another instance, which needs well under a second.
const lockLimit = time.Minute

func lock() (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(lockFile), 0o755); err != nil { // names are not secret
		return nil, fmt.Errorf("making the firewall lock: %w", err)
	}
	f, err := os.OpenFile(lockFile, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("making the firewall lock: %w", err)
	}
	for deadline := time.Now().Add(lockLimit); ; time.Sleep(5 * time.Millisecond) {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil // nothing was written
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || time.Now().After(deadline) {
			f.Close() // already failing
			return nil, fmt.Errorf("waiting for the firewall lock %s, which another tagout holds: %w", lockFile, err)
		}
	}
}
