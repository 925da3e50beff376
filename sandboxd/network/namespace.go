package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// Namespaces are the files to which a kid's namespaces are pinned.
type Namespaces struct {
	Net  string
	User string
}

// Paths returns where the namespaces of a kid are pinned below dir (inst.NetNSDir()). A kid's name has no
// dot, so the two never meet another kid's.
func Paths(dir, kid string) Namespaces {
	return Namespaces{Net: filepath.Join(dir, kid), User: filepath.Join(dir, kid+".user")}
}

// NamespaceConfig says what to make.
type NamespaceConfig struct {
	Pins     Namespaces
	UIDFirst uint32 // host uid and gid that are 0 inside
	UIDCount uint32
	Holder   string // path of kid-init
	UserOnly bool   // no network namespace: the kid lives in the machine's own
}

// CreateNamespaces makes a user namespace with the range mapped and a network namespace that it owns, and pins
// both; UserOnly leaves the second out. On an error nothing stays. IPv6 is off and nothing is up in it but what Connect adds.
func CreateNamespaces(ctx context.Context, cfg NamespaceConfig) (err error) {
	if err := os.MkdirAll(filepath.Dir(cfg.Pins.Net), 0o711); err != nil { // names are not secret
		return fmt.Errorf("making the directory of pinned namespaces: %w", err)
	}
	for _, path := range []string{cfg.Pins.Net, cfg.Pins.User} {
		if _, err := os.Lstat(path); err == nil {
			return fmt.Errorf("making the kid's namespaces: %s is there already", path)
		}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, RemoveNamespaces(cfg.Pins))
		}
	}()
	pid, release, err := hold(ctx, cfg)
	if err != nil {
		return err
	}
	defer release()
	if err := pin(pid, "user", cfg.Pins.User); err != nil || cfg.UserOnly {
		return err
	}
	if err := pin(pid, "net", cfg.Pins.Net); err != nil {
		return err
	}
	return inNamespace(cfg.Pins.Net, func() error {
		for _, knob := range []string{"ipv6/conf/all/disable_ipv6", "ipv6/conf/default/disable_ipv6"} {
			if err := sysctl(knob, "1"); err != nil {
				return err
			}
		}
		return nil
	})
}

// hold starts kid-init in the new namespaces, where it waits until release. When sandboxd dies its end of
// the pipe closes and kid-init ends too.
func hold(ctx context.Context, cfg NamespaceConfig) (pid int, release func(), err error) {
	cmd := exec.CommandContext(ctx, cfg.Holder, "hold")
	ids := []unixIDMap{{ContainerID: 0, HostID: int(cfg.UIDFirst), Size: int(cfg.UIDCount)}}
	cmd.Env = []string{}
	cmd.SysProcAttr = newNamespaces(ids)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return 0, nil, fmt.Errorf("making the kid's namespaces: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return 0, nil, fmt.Errorf("making the kid's user and network namespaces with %s: are user namespaces on? %w", cfg.Holder, err)
	}
	return cmd.Process.Pid, func() {
		stdin.Close() // the holder ends on it
		cmd.Wait()    // as above; its exit code says nothing
	}, nil
}

// pin keeps the namespace alive by mounting its file elsewhere (namespaces(7)).
func pin(pid int, kind, path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return fmt.Errorf("pinning the %s namespace: %w", kind, err)
	}
	f.Close() // empty
	src := filepath.Join("/proc", strconv.Itoa(pid), "ns", kind)
	if err := unix.Mount(src, path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("pinning the %s namespace to %s: %w", kind, path, err)
	}
	return nil
}

// RemoveNamespaces unpins both; what is not there is not an error. The kernel frees the namespaces when
// their last process is gone too.
func RemoveNamespaces(pins Namespaces) error {
	var errs []error
	for _, path := range []string{pins.Net, pins.User} {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("unpinning %s: %w", path, err))
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("unpinning %s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

// inNamespace runs fn on a thread that is in the network namespace at path. A thread that cannot come back
// stays locked and dies with its goroutine, so that no other code ever runs in the kid's namespace.
func inNamespace(path string, fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		done <- func() error {
			ns, err := os.Open(path)
			if err != nil {
				return fmt.Errorf("entering a kid's network namespace: %w", err)
			}
			defer ns.Close() // only read
			if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("entering a kid's network namespace: %w", err)
			}
			return fn()
		}()
	}()
	return <-done
}

// sysctl sets a knob below /proc/sys/net, in the network namespace of the calling thread. A kernel without
// IPv6 has none of its knobs, and needs none.
func sysctl(knob, value string) error {
	err := os.WriteFile(filepath.Join("/proc/sys/net", knob), []byte(value), 0o644) // a kernel knob
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("setting net/%s: %w", knob, err)
	}
	return nil
}
