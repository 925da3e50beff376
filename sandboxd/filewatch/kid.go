package filewatch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/session"
)

// kid is one kid that is watched. run's goroutine owns everything but alive and group's Close.
type kid struct {
	cfg      Config
	rec      audit.Record // whom records are about
	wants    Wants
	programs []program
	mounts   map[uint64]bool
	group    *os.File // the fanotify group
	alive    atomic.Int64
	told     map[string]bool // what was recorded already
}

// maxTold bounds how many different things of one kid are recorded.
const maxTold = 256

// watchKid makes the group and its marks. The caller runs and closes what it returns.
func watchKid(s *session.Session, pid int, wants Wants, cfg Config) (*kid, error) {
	programs, err := programsOf(pid, wants.Forbidden)
	if err != nil {
		return nil, err
	}
	// Events carry files opened for reading; O_NONBLOCK, so that opening a FIFO waits for nobody.
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_NOTIF|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, unix.O_RDONLY|unix.O_LARGEFILE|unix.O_CLOEXEC|unix.O_NONBLOCK)
	if errors.Is(err, unix.EMFILE) {
		return nil, errors.New("no more file watches: raise fs.fanotify.max_user_groups")
	}
	if err != nil {
		return nil, fmt.Errorf("asking for a file watch: %w", err)
	}
	k := &kid{
		cfg: cfg, wants: wants, programs: programs, group: os.NewFile(uintptr(fd), "fanotify"), told: map[string]bool{},
		rec: audit.Record{Session: s.ID, Kid: s.Kid, Mark: s.Mark, Card: s.Card, Actor: "kid", Outcome: audit.OutcomeAllow},
	}
	k.alive.Store(int64(bootclock.Now()))
	if k.mounts, err = markMounts(fd, pid, wants); err == nil {
		err = markPrograms(fd, pid, programs)
	}
	if err != nil {
		k.close()
		return nil, err
	}
	return k, nil
}

// markPrograms has every opening of a forbidden program told: that is how one is noticed that is run by handing it to
// its loader. The marks are on inodes, so others' openings are told of, too, and passed over.
func markPrograms(group, pid int, programs []program) error {
	for _, p := range programs {
		if !p.there || p.loader == (file{}) {
			continue
		}
		at := fmt.Sprintf("/proc/%d/root%s", pid, p.path)
		err := unix.FanotifyMark(group, unix.FAN_MARK_ADD, unix.FAN_OPEN, unix.AT_FDCWD, at)
		// An absolute link in the kid leads elsewhere from here; then only its start itself is seen.
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("marking %s: %w", p.path, err)
		}
	}
	return nil
}

// close ends the watch. Closing twice is harmless.
func (k *kid) close() { k.group.Close() }

// turn is how long a read may take before the reader says again that it is at work.
const turn = time.Second

// run reads events until the watch is closed.
func (k *kid) run() {
	buf := make([]byte, 16<<10)
	for {
		k.alive.Store(int64(bootclock.Now()))
		if err := k.group.SetReadDeadline(time.Now().Add(turn)); err != nil {
			return // closed
		}
		n, err := k.group.Read(buf)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			continue
		case errors.Is(err, os.ErrClosed):
			return
		case err != nil:
			k.alive.Store(0) // nobody watches any more
			k.cfg.Log.Error("watching a kid's programs and files", "kid", k.rec.Kid, "error", err)
			k.gap("watching the kid's programs and files failed: "+err.Error(), true)
			return
		}
		k.events(buf[:n])
	}
}

// Offsets in struct fanotify_event_metadata (fanotify(7)).
const (
	metaLen  = 24
	offMask  = 8
	offFD    = 16
	offPID   = 20
	lostMask = unix.FAN_Q_OVERFLOW
)

// events takes what one read returned.
func (k *kid) events(raw []byte) {
	for len(raw) >= metaLen {
		length := int(binary.NativeEndian.Uint32(raw))
		if length < metaLen || length > len(raw) {
			k.gap("the kernel's account of the kid's programs and files cannot be read", true)
			return
		}
		mask := binary.NativeEndian.Uint64(raw[offMask:])
		fd := int(int32(binary.NativeEndian.Uint32(raw[offFD:])))
		pid := int(int32(binary.NativeEndian.Uint32(raw[offPID:])))
		raw = raw[length:]
		if mask&lostMask != 0 {
			k.gap("the kid did more than could be looked at: starts of programs or writes went unseen", true)
			continue
		}
		if fd < 0 {
			continue
		}
		f := os.NewFile(uintptr(fd), "event")
		k.event(mask, f, pid)
		f.Close() // only read
	}
}

// event judges one event about f.
func (k *kid) event(mask uint64, f *os.File, pid int) {
	shown, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(int(f.Fd())))
	if err != nil {
		return // the descriptor is ours: it is there
	}
	at := clean(shown)
	switch {
	case mask&unix.FAN_OPEN_EXEC != 0:
		for i := range k.programs {
			if how := k.programs[i].match(f, at); how != "" {
				k.ran(&k.programs[i], at, how, pid)
			}
		}
	case mask&unix.FAN_OPEN != 0 && k.mine(f):
		k.loaded(f, pid)
	}
	if mask&(unix.FAN_MODIFY|unix.FAN_CLOSE_WRITE) != 0 && k.wants.Writes && !k.wants.isScratch(at) {
		k.wrote(at, pid)
	}
}

// mine says whether f was opened on one of the kid's mounts.
func (k *kid) mine(f *os.File) bool {
	var st unix.Statx_t
	err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st)
	return err != nil || st.Mask&unix.STATX_MNT_ID == 0 || k.mounts[st.Mnt_id] // one that cannot be told counts as the kid's
}

// loaded notices a forbidden program that its loader opened in order to run it.
func (k *kid) loaded(f *os.File, pid int) {
	for i := range k.programs {
		p := &k.programs[i]
		if !p.there || p.loader == (file{}) || p.file.same(f) != "inode" {
			continue
		}
		exe, err := os.Open("/proc/" + strconv.Itoa(pid) + "/exe")
		if err != nil {
			continue // it is gone: whatever it was, it does not run
		}
		if p.loader.same(exe) != "" {
			k.ran(p, p.path, "loader", pid)
		}
		exe.Close() // only read
	}
}

// ran records that a forbidden program was started.
func (k *kid) ran(p *program, at, how string, pid int) {
	detail := at + " was started"
	switch how {
	case "inode", "content":
		detail += fmt.Sprintf(", which is %s by its %s", p.path, how)
	case "loader":
		detail += " through its loader"
	}
	k.tell("ran "+p.path+" "+at+" "+how, pid, func(r *audit.Record) {
		r.Event, r.Detail = audit.EventExecSeen, detail
		r.Fields = map[string]string{"forbidden": p.path, "path": at, "by": how}
	})
}

// wrote records that a file outside the scratch places was written.
func (k *kid) wrote(at string, pid int) {
	k.tell("wrote "+at, pid, func(r *audit.Record) {
		r.Event, r.Detail = audit.EventWriteSeen, at+" was written"
		r.Fields = map[string]string{"path": at}
	})
}

// tell records something the first time that it happens.
func (k *kid) tell(key string, pid int, fill func(*audit.Record)) {
	if k.told[key] || len(k.told) >= maxTold {
		return
	}
	k.told[key] = true
	r := k.rec
	r.Process = processOf(pid)
	fill(&r)
	k.cfg.Audit.Log(r)
}

// gap records that something may have gone unseen; blind says that it is the kid's own doing, or for good.
func (k *kid) gap(detail string, blind bool) {
	r := k.rec
	r.Event, r.Outcome, r.Count, r.Detail = audit.EventGap, audit.OutcomeFail, 1, detail
	if blind {
		r.Fields = map[string]string{audit.FieldBlind: "true"}
	}
	k.cfg.Audit.Log(r)
}

// processOf names a process; what could not be read is empty.
func processOf(pid int) *audit.Process {
	p := &audit.Process{PID: pid}
	dir := "/proc/" + strconv.Itoa(pid)
	if raw, err := os.ReadFile(dir + "/comm"); err == nil && len(raw) > 0 {
		p.Comm = string(raw[:len(raw)-1])
	}
	p.Exe, _ = os.Readlink(dir + "/exe")
	return p
}
