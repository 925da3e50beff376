package supervise

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// checkBinaries looks for all of them before anything is started.
func checkBinaries(specs []Spec) error {
	for _, s := range specs {
		info, err := os.Stat(s.Path)
		if errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%s is missing: build it with `make build`, or name its directory with --bin-dir", s.Path)
		}
		if err != nil {
			return fmt.Errorf("looking for %s: %w", s.Name, err)
		}
		if !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
			return fmt.Errorf("%s is not an executable file: build it with `make build`", s.Path)
		}
	}
	return nil
}

// placeBinaries copies a binary to the instance's state directory where the daemon's user could not reach it:
// a clone in root's home directory (mode 0700), say. The copies belong to root.
func placeBinaries(cfg Config) error {
	for i, s := range cfg.Specs {
		if s.UID == 0 {
			continue
		}
		ok, err := reachable(s.Path)
		if err != nil {
			return fmt.Errorf("looking for %s: %w", s.Name, err)
		}
		if ok {
			continue
		}
		dst := filepath.Join(cfg.Inst.StateDir(), "bin", s.Name)
		if err := copyBinary(s.Path, dst); err != nil {
			return fmt.Errorf("copying %s to where its user can run it: %w", s.Name, err)
		}
		cfg.Specs[i].Path = dst
	}
	return nil
}

// reachable says whether a user without rights of its own may execute the file at path.
func reachable(path string) (bool, error) {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return false, err
	}
	if path, err = filepath.Abs(path); err != nil {
		return false, err
	}
	for p := path; ; p = filepath.Dir(p) {
		info, err := os.Stat(p)
		if err != nil {
			return false, err
		}
		if info.Mode()&0o001 == 0 {
			return false, nil
		}
		if p == "/" {
			return true, nil
		}
	}
}

// copyBinary replaces dst whole, so that a running copy is never written to.
func copyBinary(src, dst string) error {
	if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil { // binaries are not secret
		return err
	}
	// Whoever copies holds the supervisor's lock: what is there was left by one that was killed.
	old, _ := filepath.Glob(filepath.Join(filepath.Dir(dst), ".new-*"))
	for _, path := range old {
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close() // only read
	out, err := os.CreateTemp(filepath.Dir(dst), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(out.Name()) // gone after the rename
	_, err = io.Copy(out, in)
	if err = errors.Join(err, out.Chmod(0o755), out.Close()); err != nil {
		return err
	}
	return os.Rename(out.Name(), dst)
}
