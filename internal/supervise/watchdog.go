package supervise

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// notifier is the socket on which one daemon says that it makes progress (sd_notify(3)). It outlives the daemon's
// single runs.
type notifier struct {
	path string
	conn *net.UnixConn
	pid  atomic.Int64 // of the run whose word counts

	mu   sync.Mutex
	last time.Time // of the run's last word; zero: none yet
}

// listen makes the daemon's notify socket, which nobody but its user and root can reach.
func listen(path string, uid int) (*notifier, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { // names only
		return nil, fmt.Errorf("making the notify socket: %w", err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) { // a predecessor's
		return nil, fmt.Errorf("making the notify socket: %w", err)
	}
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("making the notify socket: %w", err)
	}
	n := &notifier{path: path, conn: conn}
	raw, err := conn.SyscallConn()
	if err == nil {
		err = errors.Join(raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSCRED, 1) // a descriptor
		}), err, os.Chmod(path, 0o600), os.Chown(path, uid, -1))
	}
	if err != nil {
		n.close()
		return nil, fmt.Errorf("making the notify socket: %w", err)
	}
	go n.read()
	return n, nil
}

func (n *notifier) close() {
	n.conn.Close()    // nothing is written through it
	os.Remove(n.path) // what stays is replaced by the next
}

// expect makes the word of a new run count, and forgets its predecessor's.
func (n *notifier) expect(pid int) {
	n.pid.Store(int64(pid))
	n.mu.Lock()
	defer n.mu.Unlock()
	n.last = time.Time{}
}

// read takes messages until close. The kernel says who sent one; anybody's but the daemon's own is dropped.
func (n *notifier) read() {
	msg, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(unix.SizeofUcred))
	for {
		size, control, _, _, err := n.conn.ReadMsgUnix(msg, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || senderPID(oob[:control]) != n.pid.Load() {
			continue
		}
		for _, line := range bytes.Split(msg[:size], []byte("\n")) {
			if string(line) == "WATCHDOG=1" || string(line) == "READY=1" {
				n.mu.Lock()
				n.last = time.Now()
				n.mu.Unlock()
			}
		}
	}
}

// senderPID returns the process that the kernel named with a message, 0 where it named none (unix(7)).
func senderPID(oob []byte) int64 {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(msgs) == 0 {
		return 0
	}
	cred, err := unix.ParseUnixCredentials(&msgs[0])
	if err != nil {
		return 0
	}
	return int64(cred.Pid)
}

func (n *notifier) lastWord() time.Time {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.last
}

// env is what tells the daemon where and how often to say it.
func (n *notifier) env(every time.Duration) []string {
	return []string{"NOTIFY_SOCKET=" + n.path, fmt.Sprintf("WATCHDOG_USEC=%d", every.Microseconds())}
}

// watchdog kills a run that makes no progress any more, and returns when the run has ended or ctx has; the keeper's
// loop starts the next one. Time is counted while the machine runs (CLOCK_MONOTONIC): a machine that slept is no
// daemon that hangs. Nor is it one that this process itself did not see, because it did not run either.
func (k *keeper) watchdog(ctx context.Context, c *child) {
	term := k.spec.Watchdog
	tick := time.NewTicker(term / 20)
	defer tick.Stop()
	looked := time.Now()
	grace := c.begun.Add(k.cfg.Start - term) // it may take its time to start
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.exited:
			return
		case <-tick.C:
		}
		now := time.Now()
		if now.Sub(looked) > term/2 {
			grace = now
		}
		looked = now
		since := k.notify.lastWord()
		if since.IsZero() || grace.Before(now) && grace.After(since) {
			since = grace
		}
		if still := now.Sub(since); still > term {
			k.cfg.Log.Error("daemon makes no progress: killing it", "daemon", k.spec.Name, "pid", c.cmd.Process.Pid, "still", still)
			if err := k.cfg.Cgroups.Kill(k.spec.Cgroup); err != nil {
				k.cfg.Log.Error("killing a daemon that makes no progress", "daemon", k.spec.Name, "err", err)
			}
			grace = now // one that is slow to die is not told of at every look
		}
	}
}
