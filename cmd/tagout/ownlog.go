package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/instance"
)

// actor names who runs the command, for records: root, as the API names who comes over the unix socket.
func actor() string { return fmt.Sprintf("uid:%d", os.Geteuid()) }

// record writes down something that the command itself has done on a box.
func (a *app) record(inst instance.Instance, r audit.Record) {
	if r.Actor == "" {
		r.Actor = actor()
	}
	if r.Outcome == "" {
		r.Outcome = audit.OutcomeOK
	}
	(&ownLog{inst: inst, err: a.err}).Log(r)
}

// recordLimit bounds how long the command waits for a record to be on disk.
const recordLimit = 5 * time.Second

// ownLog is the audit log of what the command does itself, without a daemon. Several commands may write to it.
type ownLog struct {
	inst instance.Instance
	err  io.Writer
}

// Err says why nothing could be recorded.
func (l *ownLog) Err() error {
	unlock, err := l.lock()
	if err != nil {
		return err
	}
	defer unlock()
	log, err := audit.Open(l.file(), l.inst.Name(), instance.CLI)
	if err != nil {
		return err
	}
	return log.Close()
}

// Log writes one record to disk.
func (l *ownLog) Log(r audit.Record) {
	if err := l.write(r); err != nil {
		fmt.Fprintf(l.err, "tagout: this is not on record: %v\n", err) // nobody is left to be told
	}
}

func (l *ownLog) write(r audit.Record) error {
	unlock, err := l.lock()
	if err != nil {
		return err
	}
	defer unlock()
	log, err := audit.Open(l.file(), l.inst.Name(), instance.CLI)
	if err != nil {
		return err
	}
	log.Log(r)
	ctx, cancel := context.WithTimeout(context.Background(), recordLimit)
	defer cancel()
	return errors.Join(log.Sync(ctx), log.Close())
}

func (l *ownLog) file() string { return l.inst.AuditFile(instance.CLI) }

// lock makes this command the log's only writer, and its directory where an older setup made none.
func (l *ownLog) lock() (unlock func(), err error) {
	dir := filepath.Dir(l.file())
	if err := os.Mkdir(dir, 0o700); err == nil {
		err = errors.Join(os.Chown(dir, -1, l.inst.GroupID()), os.Chmod(dir, fs.ModeSetgid|0o750)) // as setup makes it
		if err != nil {
			return nil, fmt.Errorf("opening the audit log: %w", err)
		}
	} else if !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("opening the audit log: %w", err)
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("opening the audit log: %w", err)
	}
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		f.Close() // only read
		return nil, fmt.Errorf("opening the audit log: %w", err)
	}
	return func() { f.Close() }, nil // only read
}
