package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"syscall"
	"time"

	"tagout/bpf"
	"tagout/killswitch"
)

// network is the killswitch.Network over the instance's pinned BPF maps. It keeps the maps open, so that a
// BPF filesystem that is unmounted afterwards does not matter.
type network struct {
	pinDir string
	log    *slog.Logger
	open   atomic.Pointer[openMaps] // nil until the maps could be opened
}

// openMaps are maps with the identity of the directory that they were opened from.
type openMaps struct {
	*bpf.Maps
	dir dirID
}

// dirID tells whether a pin directory is still the one that it was.
type dirID struct {
	dev, ino uint64
	changed  syscall.Timespec
}

// lookPeriod is how often the pin directory is looked at: for maps that were not there yet, and for those that
// a new setup has put in their place.
const lookPeriod = 500 * time.Millisecond

func newNetwork(pinDir string, log *slog.Logger) *network {
	n := &network{pinDir: pinDir, log: log}
	if err := n.look(); err != nil {
		log.Error("the network layer is not armed yet", "error", err)
	}
	return n
}

// keepOpen looks again and again until ctx ends.
func (n *network) keepOpen(ctx context.Context) {
	tick := time.NewTicker(lookPeriod)
	defer tick.Stop()
	last := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := n.look()
		if text := fmt.Sprint(err); text != last { // tell of each change once
			last = text
			if err != nil {
				n.log.Warn("looking for the BPF maps", "error", err, "armed", n.Armed() == nil)
			}
		}
	}
}

// look opens the maps where they are not open, or where the directory holds others than those that are. A
// directory that is gone changes nothing.
func (n *network) look() error {
	var st syscall.Stat_t
	if err := syscall.Stat(n.pinDir, &st); err != nil {
		return fmt.Errorf("looking at %s: %w", n.pinDir, err)
	}
	id := dirID{dev: st.Dev, ino: st.Ino, changed: st.Mtim}
	old := n.open.Load()
	if old != nil && old.dir == id {
		return nil
	}
	m, err := bpf.Open(n.pinDir)
	if err != nil {
		return err
	}
	n.open.Store(&openMaps{Maps: m, dir: id})
	if old != nil {
		// Not closed: a stop may be using it. The few descriptors go when the old maps are collected.
		n.log.Info("opened the BPF maps that replace older ones", "dir", n.pinDir)
	}
	return nil
}

// lost says what is wrong with where the maps come from. Those that are open work all the same.
func (n *network) lost() error {
	var st syscall.Stat_t
	if err := syscall.Stat(n.pinDir, &st); err != nil {
		return fmt.Errorf("the BPF filesystem is not what it was: looking at %s: %w", n.pinDir, err)
	}
	return nil
}

func (n *network) close() {
	if m := n.open.Swap(nil); m != nil {
		m.Close() // the process ends
	}
}

var errNoMaps = errors.New("the BPF maps are not open")

func (n *network) maps() (*openMaps, error) {
	if m := n.open.Load(); m != nil {
		return m, nil
	}
	return nil, errNoMaps
}

func (n *network) StopSession(mark uint32) error {
	m, err := n.maps()
	if err != nil {
		return err
	}
	return m.StopSession(mark)
}

func (n *network) RevokeSecrets(mark uint32) error {
	m, err := n.maps()
	if err != nil {
		return err
	}
	return m.RevokeSecrets(mark)
}

func (n *network) Secrets(mark uint32) (revoked bool, last time.Duration, err error) {
	m, err := n.maps()
	if err != nil {
		return false, 0, err
	}
	return m.Secrets(mark)
}

func (n *network) StopAll(on bool) error {
	m, err := n.maps()
	if err != nil {
		return err
	}
	return m.StopAll(on)
}

func (n *network) Stopped(mark uint32) (bool, error) {
	m, err := n.maps()
	if err != nil {
		return false, err
	}
	e, err := m.Session(mark)
	return err == nil && e.State != bpf.StateActive, unknown(err)
}

func (n *network) AllStopped() (bool, error) {
	m, err := n.maps()
	if err != nil {
		return false, err
	}
	on, err := m.StoppedAll()
	return err == nil && on, err
}

func (n *network) Sessions() ([]uint32, error) {
	m, err := n.maps()
	if err != nil {
		return nil, err
	}
	return m.Sessions()
}

func (n *network) Counters(mark uint32) (killswitch.Counters, error) {
	m, err := n.maps()
	if err != nil {
		return killswitch.Counters{}, err
	}
	c, err := m.Counters(mark)
	if err != nil {
		return killswitch.Counters{}, unknown(err)
	}
	out := killswitch.Counters{LastPass: c.LastPass}
	for _, t := range []bpf.Traffic{c.Kid, c.Link, c.Upstream} {
		out.Packets += t.PassedUp.Packets + t.PassedDown.Packets
	}
	return out, nil
}

func (n *network) Owner(cgroupID uint64) (uint32, netip.Addr, error) {
	m, err := n.maps()
	if err != nil {
		return 0, netip.Addr{}, err
	}
	mark, err := m.MarkOf(cgroupID)
	if err != nil {
		return 0, netip.Addr{}, unknown(err)
	}
	e, err := m.Session(mark)
	return mark, e.Addr, unknown(err)
}

func (n *network) RenewLeases(until time.Duration) (int, error) {
	m, err := n.maps()
	if err != nil {
		return 0, err
	}
	return m.RenewLeases(until)
}

func (n *network) Armed() error {
	m, err := n.maps()
	if err != nil {
		return err
	}
	return m.CanStop()
}

// unknown turns the maps' word for a session that they do not know into the switch's.
func unknown(err error) error {
	if errors.Is(err, bpf.ErrNoSession) {
		return fmt.Errorf("%w (%w)", err, fs.ErrNotExist)
	}
	return err
}
