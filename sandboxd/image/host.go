// Package image puts together what a kid sees as its root filesystem. The image `host` is the machine's own
// programs and libraries, read-only, with a small /etc made for the kid and nothing else of the machine: no
// home directories, no /etc of the host, no /var, no /run, no /sys.
package image

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"

	"tagout/internal/card"
	"tagout/sandboxd/image/store"
	"tagout/sandboxd/runtime"
)

// HostName is the name by which cards ask for the image.
const HostName = card.HostImage

// Config of the host image.
type Config struct {
	Dir     string     // where the image keeps the file that all kids share; made if need be
	Gateway netip.Addr // the resolver that kids ask
	Trust   []string   // PEM files: the system's bundle first, then the inspection CA; all must exist
}

// systemBundle is Debian's trust store (package ca-certificates).
const systemBundle = "/etc/ssl/certs/ca-certificates.crt"

// Trust lists the PEM files that kids trust: the machine's bundle where there is one, and the inspection CA.
func Trust(inspectionCA string) []string {
	if _, err := os.Stat(systemBundle); err != nil {
		return []string{inspectionCA}
	}
	return []string{systemBundle, inspectionCA}
}

// Host is the image. Safe for concurrent use.
type Host struct {
	gateway netip.Addr
	bundle  string
}

// trustPath is where the trust store is inside.
const trustPath = store.TrustPath

// NewHost writes the trust store that all kids of this instance share. Kids that run keep the one with
// which they were made.
func NewHost(cfg Config) (*Host, error) {
	var all bytes.Buffer
	for _, file := range cfg.Trust {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("preparing image host: reading the CA certificates that kids trust: %w", err)
		}
		if !bytes.Contains(pem, []byte("-----BEGIN CERTIFICATE-----")) {
			return nil, fmt.Errorf("preparing image host: %s holds no PEM certificate", file)
		}
		all.Write(bytes.TrimSpace(pem))
		all.WriteByte('\n')
	}
	if err := os.MkdirAll(cfg.Dir, 0o711); err != nil { // kids read the file below it
		return nil, fmt.Errorf("preparing image host: %w", err)
	}
	if err := os.Chmod(cfg.Dir, 0o711); err != nil { // as above, whatever the umask is
		return nil, fmt.Errorf("preparing image host: %w", err)
	}
	bundle := filepath.Join(cfg.Dir, "trust.pem")
	if err := writeFile(bundle+".new", all.Bytes()); err != nil {
		return nil, fmt.Errorf("preparing image host: %w", err)
	}
	if err := os.Rename(bundle+".new", bundle); err != nil {
		return nil, fmt.Errorf("preparing image host: %w", err)
	}
	return &Host{gateway: cfg.Gateway, bundle: bundle}, nil
}

// Env returns the environment that makes the usual programs find their way: the trust store, a home. It is the same for
// every kid.
func (h *Host) Env(string) map[string]string {
	env := h.trustEnv()
	maps.Copy(env, map[string]string{
		"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
		"HOME": runtime.Home, "USER": "kid", "LOGNAME": "kid", "SHELL": "/bin/sh", "TMPDIR": "/tmp", "LANG": "C.UTF-8",
	})
	return env
}

func (h *Host) trustEnv() map[string]string {
	env := map[string]string{}
	for _, name := range []string{"SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO"} {
		env[name] = trustPath
	}
	return env
}

// Root builds the root filesystem of one kid in dir, which must not exist, and returns what has to be
// mounted into it. The directory holds only names, links and small files; removing it needs no unmounting.
func (h *Host) Root(dir, kid string, addr netip.Addr) ([]runtime.Mount, error) {
	fail := func(err error) ([]runtime.Mount, error) {
		return nil, fmt.Errorf("building the root filesystem of kid %s: %w", kid, err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil { // the kid's root directory
		return fail(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil { // as above; the umask may have taken bits
		return fail(err)
	}
	dirs, files := runtime.RootFiles()
	dirs = append(dirs, "/usr", "/etc", "/etc/ssl", "/etc/ssl/certs", "/var", "/run", "/home", "/root", "/mnt", "/opt", "/srv")
	for _, d := range dirs {
		if err := makeDir(filepath.Join(dir, d)); err != nil {
			return fail(err)
		}
	}
	mounts := []runtime.Mount{{Source: "/usr", Target: "/usr", Tree: true}}
	tops, err := topLevel(dir)
	if err != nil {
		return fail(err)
	}
	mounts = append(mounts, tops...)
	shared, err := h.sharedFiles(dir)
	if err != nil {
		return fail(err)
	}
	mounts = append(mounts, shared...)
	for _, f := range files {
		if err := writeFile(filepath.Join(dir, f), nil); err != nil {
			return fail(err)
		}
	}
	for name, text := range etc(kid, addr, h.gateway) {
		if err := writeFile(filepath.Join(dir, name), []byte(text)); err != nil {
			return fail(err)
		}
	}
	return mounts, os.Symlink("/tmp", filepath.Join(dir, "var/tmp"))
}

// topNames are directories with programs and libraries that merged systems have in /usr.
var topNames = []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"}

// topLevel makes /bin, /lib and the like as they are on the host: links into /usr on merged systems, else
// directories that are mounted.
func topLevel(dir string) ([]runtime.Mount, error) {
	var mounts []runtime.Mount
	for _, name := range topNames {
		host, inside := "/"+name, filepath.Join(dir, name)
		info, err := os.Lstat(host)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			return nil, err
		case info.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(host)
			if err == nil {
				err = os.Symlink(to, inside)
			}
			if err != nil {
				return nil, err
			}
		default:
			if err := makeDir(inside); err != nil {
				return nil, err
			}
			mounts = append(mounts, runtime.Mount{Source: host, Target: host, Tree: true})
		}
	}
	return mounts, nil
}

// sharedFiles makes the mount points of the few files and directories below /etc that programs in /usr
// cannot do without.
func (h *Host) sharedFiles(dir string) ([]runtime.Mount, error) {
	mounts := []runtime.Mount{{Source: h.bundle, Target: trustPath}}
	for _, path := range []string{"/etc/ld.so.cache", "/etc/alternatives"} {
		info, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // a machine without it needs none
		}
		if err != nil {
			return nil, err
		}
		if info.IsDir() {
			if err := makeDir(filepath.Join(dir, path)); err != nil {
				return nil, err
			}
		}
		mounts = append(mounts, runtime.Mount{Source: path, Target: path})
	}
	for _, m := range mounts {
		if m.Target == "/etc/alternatives" {
			continue
		}
		if err := writeFile(filepath.Join(dir, m.Target), nil); err != nil {
			return nil, err
		}
	}
	return mounts, nil
}

// makeDir and writeFile give everybody read access whatever the umask is: the kid's uid is nobody's friend.
func makeDir(path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil { // see above
		return err
	}
	return os.Chmod(path, 0o755) // see above
}

func writeFile(path string, data []byte) error {
	if err := os.WriteFile(path, data, 0o644); err != nil { // see above
		return err
	}
	return os.Chmod(path, 0o644) // see above
}
