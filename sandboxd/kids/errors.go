package kids

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"tagout/internal/reason"
)

// Kind says what sort of refusal an Error is.
type Kind int

// Kinds.
const (
	Internal    Kind = iota // something broke; see the log
	Invalid                 // the request itself cannot be carried out
	NotFound                // no kid of this name
	Conflict                // the name is taken, or the kid is not in a state for it
	Tagged                  // a tag hangs on the kid, its card or the box
	Unavailable             // a daemon that must agree does not answer
	Capacity                // a limit of the box is reached
	TooLarge                // more than is carried at once
)

// Error is a refusal with its kind. Its text says what to do.
type Error struct {
	Kind   Kind
	Reason reason.Code
	Err    error
}

func (e *Error) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// KindOf returns the kind of err, Internal where it has none.
func KindOf(err error) Kind {
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	return Internal
}

// ReasonOf returns the reason code of err, reason.Internal where it has none.
func ReasonOf(err error) reason.Code {
	var e *Error
	if errors.As(err, &e) {
		return e.Reason
	}
	return reason.Internal
}

func refuse(kind Kind, code reason.Code, format string, args ...any) error {
	return &Error{Kind: kind, Reason: code, Err: fmt.Errorf(format, args...)}
}

// ranOut makes a refusal of an error that says that the machine has no more of something; others stay as they are.
func ranOut(err error) error {
	what := ""
	switch {
	case KindOf(err) != Internal:
		return err
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		what = "no room for files is left: make some, or destroy kids"
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOMEM):
		what = "the machine gives no more processes or memory: destroy kids, or raise the limit of sandboxd's unit"
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		what = "no more files can be open: destroy kids, or raise the limit of sandboxd's unit"
	default:
		return err
	}
	return refuse(Capacity, reason.Capacity, "%s: %w", what, err)
}
