package credential

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

// The revocation ledger is appended after the tokens are forgotten in memory. Tokens die with the process
// anyway; the ledger keeps a session that was revoked from getting new ones after a restart.
//
// The first line names the boot that the file belongs to; after a reboot all marks are new and the file starts
// empty. Then one line a session, at most a few hundred bytes:
//
//	boot SP boot-id SP crc32c-of-the-rest(8 hex digits) LF
//	mark(8 hex digits) SP session SP kid SP unix-seconds SP crc32c-of-the-rest(8 hex digits) LF
//
// The mark stands first and has a fixed length, so that a line that was cut off anywhere still says whose
// tokens stay denied: every mark that begins with the digits that are left.

const markDigits = 8

// ledgerRetry is how long the ledger waits before it writes again after the disk refused.
const ledgerRetry = time.Second

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// revocation is one revoked session. Session and Kid are empty where credd never minted for the mark.
type revocation struct {
	Mark         uint32
	Session, Kid string
}

// badLine is a line of the ledger that cannot be read. Marks that begin with prefix stay denied.
type badLine struct {
	line   int
	prefix string // 0 to 8 hex digits
}

// revocations is the set of what is revoked. It has no lock of its own.
type revocations struct {
	marks    map[uint32]struct{} // of this boot: sandboxd counts marks from 1 again after a reboot
	sessions map[string]struct{}
	bad      []badLine
}

func newRevocations() revocations {
	return revocations{marks: map[uint32]struct{}{}, sessions: map[string]struct{}{}}
}

func (r *revocations) add(e revocation) {
	r.marks[e.Mark] = struct{}{}
	if e.Session != "" {
		r.sessions[e.Session] = struct{}{}
	}
}

// covers says whether the session may never have a token again.
func (r *revocations) covers(mark uint32, session string) bool {
	if _, ok := r.marks[mark]; ok {
		return true
	}
	if _, ok := r.sessions[session]; ok {
		return true
	}
	text := fmt.Sprintf("%08x", mark)
	for _, b := range r.bad {
		if strings.HasPrefix(text, b.prefix) {
			return true
		}
	}
	return false
}

// ledgerFile is what the ledger needs of *os.File, so that tests can inject faults.
type ledgerFile interface {
	io.Writer
	Sync() error
	Truncate(size int64) error
	Close() error
}

// ledger writes revocations in the background: an acknowledgement never waits for a disk.
type ledger struct {
	path string
	f    ledgerFile // run alone
	good int64      // run alone: length of the file up to the last whole line
	kick chan struct{}

	mu   sync.Mutex
	todo []byte // lines not written yet; guarded by mu
	err  error  // why the last try failed, nil after a success; guarded by mu
}

// openLedger reads the ledger in dir and returns what is revoked in this boot.
func openLedger(dir, bootID string) (*ledger, revocations, error) {
	path := filepath.Join(dir, "revoked.log")
	raw, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, revocations{}, fmt.Errorf("reading the revocation ledger: %w", err)
	}
	revoked, keep := parseLedger(raw, bootID)
	keep = append([]byte(sealLine("boot "+bootID)), keep...)
	if err := writeFile(path, keep); err != nil {
		return nil, revocations{}, fmt.Errorf("writing the revocation ledger: %w", err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, revocations{}, fmt.Errorf("opening the revocation ledger: %w", err)
	}
	return &ledger{path: path, f: f, good: int64(len(keep)), kick: make(chan struct{}, 1)}, revoked, nil
}

// parseLedger returns what raw revokes for the given boot, and the lines that are to be kept: those that
// cannot be read are, and stay denied until the next boot.
func parseLedger(raw []byte, bootID string) (revoked revocations, keep []byte) {
	revoked = newRevocations()
	n := 0
	for line := range strings.Lines(string(raw)) {
		n++
		text := strings.TrimSuffix(line, "\n") // the checksum tells a torn line, not its end
		body, sealed := openLine(text)
		if boot, ok := strings.CutPrefix(body, "boot "); sealed && ok && n == 1 {
			if boot != bootID {
				return revoked, nil
			}
			continue
		}
		e, ok := parseEntry(body)
		if !sealed || !ok {
			revoked.bad = append(revoked.bad, badLine{line: n, prefix: markPrefix(text)})
			keep = append(keep, text+"\n"...)
			continue
		}
		revoked.add(e)
		keep = append(keep, text+"\n"...)
	}
	return revoked, keep
}

func sealLine(body string) string {
	return fmt.Sprintf("%s %08x\n", body, crc32.Checksum([]byte(body), castagnoli))
}

// openLine takes the checksum off a line; ok is false where it does not fit.
func openLine(text string) (body string, ok bool) {
	i := strings.LastIndexByte(text, ' ')
	if i < 0 {
		return text, false
	}
	body = text[:i]
	return body, sealLine(body) == text+"\n"
}

func parseEntry(body string) (e revocation, ok bool) {
	fields := strings.Split(body, " ")
	if len(fields) != 4 || len(fields[0]) != markDigits {
		return e, false
	}
	mark, err := strconv.ParseUint(fields[0], 16, 32)
	if err != nil {
		return e, false
	}
	e.Mark = uint32(mark)
	if fields[1] != "-" {
		e.Session, e.Kid = fields[1], fields[2]
	}
	return e, true
}

// markPrefix returns the hex digits, eight at most, with which text begins.
func markPrefix(text string) string {
	n := 0
	for n < len(text) && n < markDigits && strings.IndexByte("0123456789abcdef", text[n]) >= 0 {
		n++
	}
	return text[:n]
}

func entryLine(e revocation, now time.Time) string {
	session, kid := e.Session, e.Kid
	if session == "" {
		session, kid = "-", "-"
	}
	return sealLine(fmt.Sprintf("%08x %s %s %d", e.Mark, session, kid, now.Unix()))
}

// append queues entries and returns at once.
func (l *ledger) append(entries []revocation) {
	if len(entries) == 0 {
		return
	}
	now := time.Now()
	l.mu.Lock()
	for _, e := range entries {
		l.todo = append(l.todo, entryLine(e, now)...)
	}
	l.mu.Unlock()
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// run writes what is queued until ctx ends, and then what is left. report hears of the first failure of each
// row of failures.
func (l *ledger) run(ctx context.Context, report func(error)) {
	for {
		failed := l.healthy() != nil
		err := l.flush()
		if err != nil && !failed {
			report(err)
		}
		var again <-chan time.Time
		if err != nil {
			again = time.After(ledgerRetry)
		}
		select {
		case <-l.kick:
		case <-again:
		case <-ctx.Done():
			if err := l.flush(); err != nil {
				report(err)
			}
			return
		}
	}
}

// flush writes what is queued, whole or not at all, and syncs it.
func (l *ledger) flush() error {
	l.mu.Lock()
	lines := l.todo
	l.mu.Unlock()
	if len(lines) == 0 {
		return nil
	}
	n, err := l.f.Write(lines)
	if err == nil {
		err = l.f.Sync()
	}
	if err != nil && n > 0 {
		err = errors.Join(err, l.f.Truncate(l.good))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = err
	if err == nil {
		l.good += int64(n)
		l.todo = l.todo[len(lines):]
	}
	return err
}

// healthy returns why the ledger cannot be written, if so.
func (l *ledger) healthy() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return fmt.Errorf("writing the revocation ledger %s: free the disk: %w", l.path, l.err)
	}
	return nil
}

func (l *ledger) close() { l.f.Close() } // flush has synced it
