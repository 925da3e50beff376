package kids

import (
	"context"
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/wire"
)

// watch notes when kid-init ends: with it the kernel has killed everything in its pid namespace. It works
// for a kid-init that is this process's child and for one that was adopted.
func (m *Manager) watch(k *kid) {
	fd, err := unix.PidfdOpen(k.pid, 0)
	if err != nil {
		m.ended(k)
		return
	}
	go func() {
		defer unix.Close(fd) // only polled
		for {
			_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1) // descriptors are small
			if !errors.Is(err, unix.EINTR) {
				break
			}
		}
		unix.Wait4(k.pid, nil, unix.WNOHANG, nil) // ECHILD where it was adopted: then its parent reaps it
		m.ended(k)
	}()
}

func (m *Manager) ended(k *kid) {
	if !m.ranOut(k, false) {
		m.enter(k, wire.KidExited) // refused where it is being destroyed or was stopped
	}
	k.markGone()
	m.isStopped(context.Background(), k) // nobody waits for it
}

// isStopped says whether a stop hit the kid: the kernel's entry says so, or a tag names it. Once seen it
// stays so. A killswitchd that does not answer adds nothing.
func (m *Manager) isStopped(ctx context.Context, k *kid) bool {
	m.mu.Lock()
	stopped := k.state.Stopped()
	m.mu.Unlock()
	if stopped {
		return true
	}
	if in, err := m.cfg.Kernel.Stopped(k.rec.Session.Mark); err == nil && in {
		m.noteStopped(k)
		return true
	}
	for _, tag := range m.tags(ctx) {
		if covers(tag, k) {
			m.noteStopped(k)
			return true
		}
	}
	return false
}

// noteStops brings the stopped flag of every kid up to date with one question to killswitchd and one to the kernel,
// however many kids there are.
func (m *Manager) noteStops(ctx context.Context) {
	tags := m.tags(ctx)
	marks, err := m.cfg.Kernel.StoppedMarks()
	if err != nil { // what the tags say is known all the same
		m.cfg.Log.Error("asking the kernel which kids are stopped", "error", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range m.kids {
		if marks[k.rec.Session.Mark] || slices.ContainsFunc(tags, func(t wire.Tag) bool { return covers(t, k) }) {
			k.state.Stop()
		}
	}
}

func (m *Manager) noteStopped(k *kid) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k.state.Stop()
}

// tags returns the tags that hang, none where killswitchd does not answer soon.
func (m *Manager) tags(ctx context.Context) []wire.Tag {
	ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	tags, err := m.cfg.Stopper.Tags(ctx)
	if err != nil {
		return nil
	}
	return tags
}

// covers says whether a hanging tag is on the kid.
func covers(t wire.Tag, k *kid) bool {
	if !t.Released.IsZero() {
		return false
	}
	s := &k.rec.Session
	return t.Scope.All || t.Scope.Kid == k.name || t.Scope.Card != "" && t.Scope.Card == s.Card || slices.Contains(t.Marks, s.Mark)
}
