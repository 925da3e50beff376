package build

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"

	"tagout/internal/wire"
	"tagout/sandboxd/image/store"
	"tagout/sandboxd/image/unpack"
)

// script runs a shell script in the kid. stdout may be nil: then its lines are progress.
func (j *Job) script(ctx context.Context, kid, text string, args []string, stdout func([]byte) error) error {
	said := &said{tell: j.progress}
	if stdout == nil {
		stdout = said.write
	}
	return j.run(ctx, kid, append([]string{"/bin/sh", "-c", text, "build"}, args...), stdout, said)
}

// stream runs a command in the kid, whose output is for read. It ends with the first error of the two.
func (j *Job) stream(ctx context.Context, kid string, argv []string, read func(io.Reader) error) error {
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := read(r)
		r.CloseWithError(errors.Join(errRead, err)) // the command need not go on
		done <- err
	}()
	err := j.run(ctx, kid, argv, func(p []byte) error { _, err := w.Write(p); return err }, &said{tell: func(string) {}})
	w.CloseWithError(err) // nil: the end
	if readErr := <-done; err == nil || errors.Is(err, errRead) {
		return readErr
	}
	return err
}

// errRead is wrapped where a command was not heard to its end.
var errRead = errors.New("nobody reads its output any more")

// run runs a command in the kid. What it writes to stderr, said keeps.
func (j *Job) run(ctx context.Context, kid string, argv []string, stdout func([]byte) error, said *said) error {
	var exit *wire.ExecExit
	var unheard error
	err := j.b.kids.Exec(ctx, kid, j.actor, wire.ExecRequest{Argv: argv, Dir: "/"}, func(f wire.ExecFrame) error {
		if f.Exit != nil {
			exit = f.Exit
		}
		if len(f.Stdout) > 0 {
			unheard = stdout(f.Stdout)
		}
		if len(f.Stderr) > 0 && unheard == nil {
			unheard = said.write(f.Stderr)
		}
		return unheard
	})
	switch {
	case err != nil:
		return err
	case unheard != nil:
		return unheard
	case exit == nil:
		return errors.New("the command was called off")
	case exit.Result != "exited":
		return fmt.Errorf("the command was ended: %s %s", exit.Result, exit.Detail)
	case exit.Code != 0:
		return &failure{code: exit.Code, text: said.last()}
	}
	return nil
}

// failure is a command that failed by itself.
type failure struct {
	code int
	text string // what it said last
}

func (f *failure) Error() string { return fmt.Sprintf("it ended with code %d: %s", f.code, f.text) }

// forgeries are apt's and gpgv's words for bytes that are not those that were signed.
var forgeries = []string{"Hash Sum mismatch", "BADSIG", "NO_PUBKEY", "is not signed", "signatures were invalid", "signatures couldn't be verified", "File has unexpected size"}

// told turns what programs say of some failures into errors that are known.
func told(err error) error {
	var f *failure
	if !errors.As(err, &f) {
		return err
	}
	for _, words := range forgeries {
		if strings.Contains(f.text, words) {
			return fmt.Errorf("%w: %w", store.ErrForged, err)
		}
	}
	for _, words := range noSpace {
		if strings.Contains(f.text, words) {
			return fmt.Errorf("%w: give the build more --space: %w", unix.ENOSPC, err)
		}
	}
	return err
}

// noSpace is what apt-get, dpkg and tar say where a disk is full: the last tells of a write that fitted in part.
var noSpace = []string{"No space left on device", "don't have enough free space", "Wrote only "}

const (
	maxLine = 200
	maxSaid = 2000 // bytes that are kept of what a command said last
)

// said keeps the last lines of what nobody trusts and tells of each, in printable characters.
type said struct {
	tell func(line string)
	part []byte // of the line that has begun
	text string
}

func (s *said) write(p []byte) error {
	for _, b := range p {
		if b != '\n' && b != '\r' {
			if len(s.part) < maxLine {
				s.part = append(s.part, b)
			}
			continue
		}
		s.line()
	}
	return nil
}

func (s *said) line() {
	line := strings.TrimSpace(strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, string(s.part)))
	s.part = s.part[:0]
	if line == "" {
		return
	}
	s.tell(line)
	s.text += line + "\n"
	s.text = s.text[max(0, len(s.text)-maxSaid):]
}

func (s *said) last() string {
	s.line()
	return strings.TrimSpace(strings.ToValidUTF8(s.text, "?"))
}

// atMost keeps output up to a length; beyond it the command is given up.
func atMost(to *strings.Builder, most int) func([]byte) error {
	return func(p []byte) error {
		if to.Len()+len(p) > most {
			return fmt.Errorf("it says more than %d bytes", most)
		}
		to.Write(p) // never fails
		return nil
	}
}

// layer gives a tar stream to u and returns its digest.
func layer(ctx context.Context, u *unpack.Unpacker, tar io.Reader) (string, error) {
	sum := sha256.New()
	if err := u.Layer(ctx, io.TeeReader(tar, sum)); err != nil {
		return "", err
	}
	return "sha256:" + hex.EncodeToString(sum.Sum(nil)), nil
}
