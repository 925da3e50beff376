package drill

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"tagout/internal/cgroup"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// hand is what the drill does to a kid from outside, where a technique needs that.
type hand interface {
	// before does it; the beacon was seen at work.
	before(ctx context.Context) error
	// after ends it, once killswitchd has reported; it returns when, 0 where nothing was done. It is not
	// called where the stop was never ordered.
	after() (time.Duration, error)
	// undo ends it in any case, and frees what was made.
	undo() error
}

func (d *duel) newHand(kid wire.Kid) hand {
	switch d.c.technique.Host {
	case "freeze":
		return &freezer{d: d, dir: kid.Cgroup}
	case "disk":
		return &disk{d: d, dir: kid.Cgroup}
	}
	return noHand{}
}

type noHand struct{}

func (noHand) before(context.Context) error  { return nil }
func (noHand) after() (time.Duration, error) { return 0, nil }
func (noHand) undo() error                   { return nil }

// freezer freezes the whole kid.
type freezer struct {
	d       *duel
	dir     string
	freezer string // in the v1 hierarchy, "" where there is none
}

func (f *freezer) before(ctx context.Context) error {
	layout, err := cgroup.Detect()
	if err != nil {
		return err
	}
	f.freezer = layout.Freezer(f.d.Inst.KidsCgroupRel() + "/" + f.d.kid)
	if err := cgroup.Freeze(f.dir, f.freezer); err != nil {
		return err
	}
	file, word := filepath.Join(f.dir, "cgroup.events"), "frozen 1"
	if f.freezer != "" {
		file, word = filepath.Join(f.freezer, "freezer.state"), "FROZEN"
	}
	err = practice.Wait(ctx, "the kid is frozen", func() bool {
		raw, err := os.ReadFile(file)
		return err == nil && strings.Contains(string(raw), word)
	})
	f.d.note("the kid is frozen")
	return err
}

// after thaws what the stop left frozen: only then can be seen that nothing comes of it.
func (f *freezer) after() (time.Duration, error) {
	at := practice.Now()
	f.d.note("the kid is thawed")
	return at, f.undo()
}

func (f *freezer) undo() error { return cgroup.Thaw(f.dir, f.freezer) }

// diskTarget is where the agent looks for the disk.
const diskTarget = "/workspace/disk"

// disk mounts a disk into the kid and makes it stop answering. A process of its own holds it, which lets go when
// this one dies: a frozen filesystem holds whoever writes to it for ever.
type disk struct {
	d    *duel
	dir  string
	work string // directory of the disk's image
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Scanner
}

func (k *disk) before(ctx context.Context) error {
	if err := k.mount(); err != nil {
		return err
	}
	// The writers find the disk by themselves; frozen before they are in it, it would hold nobody.
	err := practice.Wait(ctx, "the disk is written to", func() bool {
		files, err := os.ReadDir(filepath.Join(k.root(), diskTarget))
		return err == nil && len(files) > 2 // lost+found, and a file of each writer
	})
	if err == nil {
		err = k.say("freeze", "frozen")
	}
	k.d.note("the disk is frozen")
	return err
}

// pid is any process of the kid.
func (k *disk) pid() int {
	pids, err := cgroup.Procs(k.dir)
	if err != nil || len(pids) == 0 {
		return 0
	}
	return pids[0]
}

// root is the kid's root, seen from outside.
func (k *disk) root() string { return filepath.Join("/proc", strconv.Itoa(k.pid()), "root") }

func (k *disk) mount() error {
	uids := familyOf(k.dir)
	if uids.end == 0 {
		return errors.New("the kid has no uids of its own: there is nobody to give the disk to")
	}
	uid, ok := uint64(0), false
	pids, err := cgroup.Procs(k.dir)
	for _, pid := range pids {
		if u, known := uidOf(pid); known && u > uid { // commands have a higher uid than the kid's init
			uid, ok = u, true
		}
	}
	if err != nil || !ok {
		return fmt.Errorf("finding the kid's processes: %w", err)
	}
	if k.work, err = os.MkdirTemp(k.d.Inst.RunDir(), "disk-"); err != nil {
		return err
	}
	k.cmd = exec.Command(k.d.agentPath(), "hold-disk", k.work, strconv.Itoa(pids[0]), diskTarget, strconv.FormatUint(uid, 10)) // our own binary
	k.cmd.Stderr = k.d.Out
	out, err := k.cmd.StdoutPipe()
	if err == nil {
		k.in, err = k.cmd.StdinPipe()
	}
	if err == nil {
		err = k.cmd.Start()
	}
	if err != nil {
		k.cmd = nil
		return fmt.Errorf("starting the disk's holder: %w", err)
	}
	k.out = bufio.NewScanner(out)
	return k.hear("mounted")
}

func (k *disk) say(word, answer string) error {
	if _, err := fmt.Fprintln(k.in, word); err != nil {
		return fmt.Errorf("telling the disk to %s: %w", word, err)
	}
	return k.hear(answer)
}

func (k *disk) hear(want string) error {
	if !k.out.Scan() || k.out.Text() != want {
		return fmt.Errorf("the disk's holder said %q, not %q: see above", k.out.Text(), want)
	}
	return nil
}

func (k *disk) after() (time.Duration, error) {
	at := practice.Now()
	err := k.say("thaw", "thawed")
	k.d.note("the disk is thawed")
	return at, err
}

func (k *disk) undo() error {
	var err error
	if k.cmd != nil {
		k.in.Close() // it thaws and ends
		err = k.cmd.Wait()
		k.cmd = nil
	}
	if k.work != "" {
		err = errors.Join(err, os.RemoveAll(k.work))
	}
	return err
}
