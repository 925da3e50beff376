package bpf

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// CanStop returns nil where this process may write what StopSession and StopAll write, and changes nothing: it
// deletes what cannot exist. The kernel checks the right to write first (bpf(2), BPF_MAP_DELETE_ELEM).
func (m *Maps) CanStop() error {
	// No session has mark 0, so it has no stop either.
	if err := m.remove(tagoutMapStopped, uint32(0)); err != nil {
		return err
	}
	if err := m.remove(tagoutMapRevoked, uint32(0)); err != nil {
		return err
	}
	// Array entries cannot be deleted: EINVAL is the answer to those who may write.
	if err := m.remove(tagoutMapStopAll, uint32(0)); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("checking the global flag: %w", err)
	}
	return nil
}
