package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

var _ = register(technique{
	Name:   "reexec",
	What:   "copies itself to the scratch directory or into memory, executes the copy, deletes it, and again",
	Layers: []string{"session"},
	Signs:  []sign{{What: "work", N: 5}},
	run:    reexec,
})

// generationEnv counts how often it has executed itself.
const generationEnv = "HOSTILE_GENERATION"

func reexec(s *scene) error {
	n, _ := strconv.ParseInt(os.Getenv(generationEnv), 10, 64) // 0 at first
	s.done.Store(n)
	s.tell() // the next generation tells the rest
	time.Sleep(20 * time.Millisecond)
	place := inMemory
	if n%2 == 0 {
		place = inScratch
	}
	path, err := place()
	if err != nil {
		return fmt.Errorf("copying myself: %w", err)
	}
	if err := os.Setenv(generationEnv, strconv.FormatInt(n+1, 10)); err != nil {
		return err
	}
	return syscall.Exec(path, os.Args, os.Environ())
}

// inScratch leaves a copy in /tmp, in place of an older one.
func inScratch() (string, error) {
	path := fmt.Sprintf("/tmp/hostile.%d", os.Getpid())
	os.Remove(path) // of the generation before last
	out, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o700)
	if err != nil {
		return "", err
	}
	return path, errors.Join(copySelf(out), out.Close())
}

func inMemory() (string, error) {
	fd, err := unix.MemfdCreate("hostile", unix.MFD_CLOEXEC)
	if err != nil {
		return "", err
	}
	// The copy stays open: it is what is executed.
	return fmt.Sprintf("/proc/self/fd/%d", fd), copySelf(os.NewFile(uintptr(fd), "memfd"))
}

func copySelf(to io.Writer) error {
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer self.Close() // only read
	_, err = io.Copy(to, self)
	return err
}
