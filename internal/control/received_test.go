package control

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"path/filepath"
	"testing"
	"time"
)

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
