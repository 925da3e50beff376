package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Uninstall takes every program off cgroups and kid links and removes the pins. The kids must be gone: this
// opens their way. It finds what is attached also when the pins are gone, goes on after an error and returns
// all of them; running it again, or where nothing is installed, is not an error.
func Uninstall(pinDir string, kidsCgroup string, daemonCgroups []string) error {
	cgroups := append([]string{kidsCgroup}, daemonCgroups...)
	var errs []error

	maps := findMaps(pinDir, cgroups)
	if m := maps[tagoutMapKidLinks]; m != nil {
		for _, ifindex := range kidLinks(m) {
			errs = append(errs, detachLink(ifindex))
		}
	}
	closeMaps(maps)
	for _, dir := range cgroups {
		errs = append(errs, detachCgroup(dir))
	}
	errs = append(errs, detachExec(pinDir), removePins(pinDir))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("removing BPF programs: %w", err)
	}
	return nil
}

func detachLink(ifindex int) error {
	tcx, err := haveTCX()
	if err != nil {
		return err
	}
	if !tcx {
		if err := detachClsact(ifindex); err != nil && !errors.Is(err, unix.ENODEV) {
			return err
		}
		return nil
	}
	for _, h := range linkHooks {
		if err := h.detach(ifindex); err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("taking %s off link %d: %w", h.program, ifindex, err)
		}
	}
	return nil
}

func detachCgroup(dir string) error {
	f, err := os.Open(dir) // the caller's cgroup
	if errors.Is(err, fs.ErrNotExist) {
		return nil // its programs went with it
	}
	if err != nil {
		return err
	}
	defer f.Close() // only a descriptor
	for _, h := range append(append([]hook{}, kidHooks...), daemonHooks...) {
		if err := h.detach(int(f.Fd())); err != nil {
			return fmt.Errorf("taking %s off %s: %w", h.program, dir, err)
		}
	}
	return nil
}

// removePins removes the instance's directory, and the one above it when it was the last in there.
func removePins(dir string) error {
	if !onBPFFS(dir) {
		return nil
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if up := filepath.Dir(dir); filepath.Base(up) == "tagout" {
		if err := os.Remove(up); err != nil && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
