package control

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/http"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// unread is how many bytes the other side has not read yet (SIOCOUTQ, tcp(7); unix sockets have it too).
func unread(t *testing.T, c net.Conn) (n int) {
	t.Helper()
	raw, err := c.(syscall.Conn).SyscallConn()
	if err == nil {
		err = errors.Join(raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }), err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestReceivedAtIsTheFirstByte sends two requests over one connection, each byte by hand: the clock of each
// starts at its own first byte, and not at the end of its head.
func TestReceivedAtIsTheFirstByte(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := Listen(path, -1)
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan time.Time, 2)
	h := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		at, ok := ReceivedAt(r.Context())
		if !ok {
			t.Error("no arrival time")
		}
		got <- at
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, l, h, time.Second) }()
	defer func() { cancel(); <-done }()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() // a test
	answers := bufio.NewReader(c)
	for range 2 {
		before := time.Now()
		c.Write([]byte("G")) // the answer shows it
		for give := time.Now().Add(10 * time.Second); unread(t, c) != 0; runtime.Gosched() {
			if time.Now().After(give) {
				t.Fatal("nobody reads the first byte")
			}
		}
		pause := time.NewTimer(50 * time.Millisecond)
		<-pause.C // the gap that is measured
		between := time.Now()
		c.Write([]byte("ET / HTTP/1.1\r\nHost: x\r\n\r\n")) // the answer shows it
		at := <-got
		if at.Before(before) || at.After(between) {
			t.Errorf("arrival %v after the first byte, head complete at %v", at.Sub(before), between.Sub(before))
		}
		resp, err := http.ReadResponse(answers, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close() // empty
	}
	if _, ok := ReceivedAt(context.Background()); ok {
		t.Error("an arrival time without a request")
	}
}
