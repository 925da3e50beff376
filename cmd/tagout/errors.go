package main

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"tagout/internal/card"
	"tagout/internal/config"
	"tagout/internal/control"
	"tagout/internal/instance"
)

// Exit codes; the help of the root command and docs list them.
const (
	exitOK          = 0
	exitFailure     = 1
	exitUsage       = 2
	exitRefused     = 3
	exitUnreachable = 4
	exitIncomplete  = 5
	exitPending     = 6
	exitTimeout     = 124 // as timeout(1)
	exitInterrupted = 130 // as the shell after SIGINT
	exitSignal      = 128 // plus the signal's number, as the shell
)

// coded is an error with an exit code of its own. A nil err prints nothing.
type coded struct {
	code int
	err  error
}

func (c *coded) Error() string {
	if c.err == nil {
		return ""
	}
	return c.err.Error()
}

func (c *coded) Unwrap() error { return c.err }

func usage(err error) error { return &coded{exitUsage, err} }

// interrupted is how a command that was called off ends, whatever that made of what it was doing.
func interrupted(err error) error {
	var call *control.Unanswered
	var c *coded
	if errors.As(err, &call) || errors.As(err, &c) && c.code == exitInterrupted {
		err = nil // that the call was given up is all there is to say
	}
	if err == nil || err.Error() == "" {
		return &coded{exitInterrupted, errors.New("interrupted")}
	}
	return &coded{exitInterrupted, fmt.Errorf("interrupted: %w", err)}
}

// needRoot refuses everybody else before anything is tried.
func needRoot(what string) error {
	if uid := os.Geteuid(); uid != 0 {
		return &coded{exitRefused, fmt.Errorf("%s needs root, this is uid %d: run it with sudo", what, uid)}
	}
	return nil
}

// report prints err as one line and returns its exit code. What is wrong with a card or a configuration gets
// a line each, because each has a place of its own.
func (a *app) report(err error) int {
	if err == nil {
		return exitOK
	}
	text := err.Error()
	var problems card.Errors
	switch {
	case errors.As(err, &problems):
		fmt.Fprintln(a.err, problems.Error()) // nobody is left to be told
	case text != "":
		fmt.Fprintf(a.err, "tagout: %s\n", strings.ReplaceAll(strings.TrimSpace(text), "\n", "; ")) // as above
	}
	return exitCode(err)
}

func exitCode(err error) int {
	var c *coded
	var problems config.Errors
	var call *control.Unanswered
	switch {
	case errors.As(err, &c):
		return c.code
	case errors.As(err, &problems):
		return exitUsage
	case errors.Is(err, instance.ErrUnknown):
		return exitUnreachable
	case control.Status(err) != 0:
		return statusCode(control.Status(err))
	case errors.Is(err, unix.EACCES) && errors.As(err, &call):
		return exitRefused
	case errors.As(err, &call):
		return exitUnreachable
	}
	return exitFailure
}

// statusCode turns the HTTP status of a daemon's refusal into an exit code.
func statusCode(status int) int {
	switch status {
	case http.StatusBadRequest, http.StatusNotFound, http.StatusUnprocessableEntity, http.StatusRequestEntityTooLarge:
		return exitUsage
	case http.StatusForbidden, http.StatusConflict, http.StatusLocked, http.StatusInsufficientStorage, http.StatusTooManyRequests:
		return exitRefused
	case http.StatusServiceUnavailable, http.StatusBadGateway, http.StatusGatewayTimeout:
		return exitUnreachable
	}
	return exitFailure
}
