package credential

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// TestTornLedgerLineDeniesItsSession cuts the last line at every byte.
func TestTornLedgerLineDeniesItsSession(t *testing.T) {
	first := entryLine(revocation{Mark: 0x54300007}, time.Unix(1, 0))
	last := entryLine(revocation{Mark: testMark, Session: "01KID1", Kid: "kid1"}, time.Unix(2, 0))
	head := sealLine("boot "+testBoot) + first
	for n := 1; n < len(last)-1; n++ {
		revoked, keep := parseLedger([]byte(head+last[:n]), testBoot)
		if !revoked.covers(testMark, "01KID1") || !revoked.covers(0x54300007, "x") {
			t.Fatalf("cut after %d bytes: the session is not denied", n)
		}
		if len(revoked.bad) != 1 || revoked.bad[0].line != 3 {
			t.Fatalf("cut after %d bytes: reported %+v", n, revoked.bad)
		}
		if n > markDigits && revoked.covers(otherMark, "01KID2") {
			t.Fatalf("cut after %d bytes: another session is denied too", n)
		}
		again, _ := parseLedger(append([]byte(sealLine("boot "+testBoot)), keep...), testBoot)
		if !again.covers(testMark, "01KID1") {
			t.Fatalf("cut after %d bytes: the second start forgot the denial", n)
		}
	}
	if revoked, _ := parseLedger([]byte(head+last), testBoot); len(revoked.bad) != 0 {
		t.Errorf("a whole ledger is reported as bad: %+v", revoked.bad)
	}
}

func TestLedgerOfAnEarlierBootIsDropped(t *testing.T) {
	raw := sealLine("boot another") + entryLine(revocation{Mark: testMark}, time.Unix(1, 0)) + "torn"
	revoked, keep := parseLedger([]byte(raw), testBoot)
	if revoked.covers(testMark, "s") || len(keep) != 0 {
		t.Error("marks of another boot are denied in this one")
	}
	// A first line that cannot be trusted does not clear anything.
	raw = strings.Replace(raw, "boot another", "boot anothex", 1)
	if revoked, _ := parseLedger([]byte(raw), testBoot); !revoked.covers(testMark, "s") {
		t.Error("a changed first line cleared the ledger")
	}
}

func TestTornLedgerIsReportedAndDeniesAfterARestart(t *testing.T) {
	b := newBox(t).start()
	b.put("vendor_api", testValue, "api.vendor.test:443")
	b.mint("kid1", testMark, "vendor_api")
	if err := b.call("POST", "/v1/revoke", wire.RevokeRequest{Marks: []uint32{testMark}}, nil); err != nil {
		t.Fatal(err)
	}
	b.stop()
	path := filepath.Join(b.dir, "revoked.log")
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, raw[:len(raw)-5], 0o600); err != nil {
		t.Fatal(err)
	}
	b.start()
	refusedWith(t, b.call("POST", "/v1/sessions", mintFor("kid1", testMark, "vendor_api"), nil), 423, reason.Stopped)
	b.mint("kid2", otherMark, "vendor_api")
	reported := false
	for _, rec := range b.rec.find(audit.EventTokenRevoked) {
		reported = reported || rec.Outcome == audit.OutcomeFail && rec.Reason == reason.Malformed
	}
	if !reported {
		t.Error("the torn line was not reported")
	}
}

// faultyFile fails as it is told: whole, or after it took half of the bytes.
type faultyFile struct {
	*os.File
	fail string
}

func (f *faultyFile) Write(p []byte) (int, error) {
	switch f.fail {
	case "write":
		return 0, errors.New("no space left on device")
	case "half":
		n, _ := f.File.Write(p[:len(p)/2])
		return n, errors.New("no space left on device")
	}
	return f.File.Write(p)
}

func (f *faultyFile) Sync() error {
	if f.fail == "sync" {
		return errors.New("input/output error")
	}
	return f.File.Sync()
}

func TestLedgerSurvivesAFullDisk(t *testing.T) {
	for _, fail := range []string{"write", "half", "sync"} {
		t.Run(fail, func(t *testing.T) {
			dir := t.TempDir()
			l, _, err := openLedger(dir, testBoot)
			if err != nil {
				t.Fatal(err)
			}
			f := &faultyFile{File: l.f.(*os.File), fail: fail} // made by openLedger
			l.f = f
			l.append([]revocation{{Mark: 1}})
			if err := l.flush(); err == nil || l.healthy() == nil {
				t.Fatal("the failure was not noticed")
			}
			l.append([]revocation{{Mark: 2, Session: "s", Kid: "k"}})
			f.fail = ""
			if err := l.flush(); err != nil || l.healthy() != nil {
				t.Fatal(err)
			}
			l.close()
			raw, err := os.ReadFile(l.path)
			if err != nil {
				t.Fatal(err)
			}
			revoked, _ := parseLedger(raw, testBoot)
			if len(revoked.bad) != 0 || len(revoked.marks) != 2 || !revoked.covers(9, "s") {
				t.Errorf("the ledger reads %q: %+v", raw, revoked)
			}
		})
	}
}

func TestLedgerWritesWhatIsLeftAtTheEnd(t *testing.T) {
	l, _, err := openLedger(t.TempDir(), testBoot)
	if err != nil {
		t.Fatal(err)
	}
	l.append([]revocation{{Mark: 1}})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	l.run(ctx, func(err error) { t.Error(err) })
	raw, err := os.ReadFile(l.path)
	if revoked, _ := parseLedger(raw, testBoot); err != nil || len(revoked.marks) != 1 {
		t.Errorf("ledger %q, %v", raw, err)
	}
}

func FuzzLedger(f *testing.F) {
	f.Add([]byte(sealLine("boot "+testBoot) + entryLine(revocation{Mark: 1, Session: "s", Kid: "k"}, time.Unix(1, 0))))
	f.Add([]byte("\x00\x00\n54300001 x"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		revoked, keep := parseLedger(raw, testBoot)
		again, _ := parseLedger(append([]byte(sealLine("boot "+testBoot)), keep...), testBoot)
		if fmt.Sprint(len(revoked.marks), len(revoked.bad)) != fmt.Sprint(len(again.marks), len(again.bad)) {
			t.Fatalf("%+v became %+v after a rewrite", revoked, again)
		}
	})
}
