package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// TestATornLedgerDeniesAfterKill9 (invariants 1 and 6): credd is killed and its ledger cut anywhere in its last line, as a
// crash does. From its first answer on the new credd refuses every session that was revoked, the torn one's too, and no
// other.
func TestATornLedgerDeniesAfterKill9(t *testing.T) {
	w := newWorld(t)
	w.start()
	if err := w.call("PUT", "/v1/vault/vendor_api", wire.VaultEntry{Value: testValue, Hosts: []string{"api.vendor.test:443"}}, nil); err != nil {
		t.Fatal(err)
	}
	seed := uint64(time.Now().UnixNano())
	rnd := rand.New(rand.NewPCG(seed, 0))
	ledger := filepath.Join(w.inst.CreddDir(), "revoked.log")
	revoked := map[uint32]bool{}
	for round := range 10 {
		mark := w.inst.SessionMark(uint32(1000 + rnd.IntN(900_000)))
		if err := w.call("POST", "/v1/sessions", mintOf(mark), nil); err != nil {
			t.Fatal(err)
		}
		if err := w.call("POST", "/v1/tokens/revoke", wire.TokenRevokeRequest{TokenSelection: wire.TokenSelection{Kid: mintOf(mark).Kid}}, nil); err != nil {
			t.Fatal(err)
		}
		revoked[mark] = true
		line := []byte(fmt.Sprintf("%08x ", mark))
		raw := w.until(ledger, line)
		w.kill()
		at := bytes.LastIndex(raw, line)
		cut := at + 9 + rnd.IntN(len(raw)-at-9) // at least the mark is there: shorter ones deny more, see package credential
		if err := os.Truncate(ledger, int64(cut)); err != nil {
			t.Fatal(err)
		}
		w.startUnseen()
		for mark := range revoked {
			if err := w.first(mintOf(mark)); reasonOf(err) != reason.Stopped && reasonOf(err) != reason.CreddDown {
				t.Fatalf("seed %d, round %d, cut at %d of %d: session %#x: %v", seed, round, cut-at, len(raw)-at, mark, err)
			}
		}
		w.healthy()
		for mark := range revoked {
			if err := w.call("POST", "/v1/sessions", mintOf(mark), nil); reasonOf(err) != reason.Stopped {
				t.Fatalf("seed %d, round %d, cut at %d of %d: session %#x: %v", seed, round, cut-at, len(raw)-at, mark, err)
			}
		}
		other := w.inst.SessionMark(uint32(10 + round))
		if err := w.call("POST", "/v1/sessions", mintOf(other), nil); err != nil {
			t.Fatalf("seed %d, round %d: another session: %v", seed, round, err)
		}
	}
}

func mintOf(mark uint32) wire.MintRequest {
	return wire.MintRequest{Kid: fmt.Sprintf("kid-%x", mark), Session: fmt.Sprintf("01S%X", mark), Card: "c", Mark: mark, Secrets: []wire.MintSecret{{Name: "vendor_api"}}}
}

func reasonOf(err error) reason.Code {
	var refused *control.Error
	if errors.As(err, &refused) {
		return refused.Problem.Reason
	}
	return reason.OK
}

// until waits until the file holds the text whole, up to the end of its line, and returns what it holds.
func (w *world) until(file string, text []byte) []byte {
	w.t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for {
		raw, err := os.ReadFile(file)
		if i := bytes.LastIndex(raw, text); err == nil && i >= 0 && bytes.HasSuffix(raw, []byte("\n")) {
			return raw
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("%s does not get its line: %v", file, err)
		}
		time.Sleep(time.Millisecond)
	}
}

// first returns the first answer to a mint that there is.
func (w *world) first(req wire.MintRequest) error {
	w.t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	c := control.NewClient(w.inst.Socket(instance.Credd))
	defer c.CloseIdle()
	for {
		err := c.Call(context.Background(), http.MethodPost, "/v1/sessions", req, nil)
		var silent *control.Unanswered
		if !errors.As(err, &silent) {
			return err
		}
		if time.Now().After(deadline) {
			w.t.Fatal(err)
		}
	}
}
