package witness

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"tagout/internal/audit"
)

// grown is a log of which every state can be signed.
type grown struct {
	signer note.Signer
	key    note.Verifier
	hashes []tlog.Hash
	n      int64
}

func newLog(t testing.TB, origin string) *grown {
	t.Helper()
	private, public, err := note.GenerateKey(rand.Reader, origin)
	must(t, err)
	g := &grown{}
	g.signer, err = note.NewSigner(private)
	must(t, err)
	g.key, err = note.NewVerifier(public)
	must(t, err)
	return g
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (g *grown) ReadHashes(at []int64) ([]tlog.Hash, error) {
	var out []tlog.Hash
	for _, i := range at {
		out = append(out, g.hashes[i])
	}
	return out, nil
}

func (g *grown) add(t testing.TB, records ...string) {
	t.Helper()
	for _, r := range records {
		hs, err := tlog.StoredHashes(g.n, []byte(r), g)
		must(t, err)
		g.hashes = append(g.hashes, hs...)
		g.n++
	}
}

func (g *grown) signed(t testing.TB) string {
	t.Helper()
	root, err := tlog.TreeHash(g.n, g)
	must(t, err)
	n, err := note.Sign(&note.Note{Text: audit.Checkpoint{Origin: g.key.Name(), Size: uint64(g.n), Root: audit.Hash(root)}.Text()}, g.signer)
	must(t, err)
	return string(n)
}

// request asks for a signature under the newest checkpoint, with a proof from old.
func (g *grown) request(t testing.TB, old int64) string {
	t.Helper()
	text := fmt.Sprintf("old %d\n", old)
	if old > 0 && old < g.n {
		proof, err := tlog.ProveTree(g.n, old, g)
		must(t, err)
		for _, h := range proof {
			text += base64.StdEncoding.EncodeToString(h[:]) + "\n"
		}
	}
	return text + "\n" + g.signed(t)
}

// TestOnlyGrowthIsSigned, also by a witness that was started again.
func TestOnlyGrowthIsSigned(t *testing.T) {
	dir := t.TempDir()
	key, err := OpenKey(filepath.Join(dir, "key"), "witness.test")
	must(t, err)
	again, err := OpenKey(filepath.Join(dir, "key"), "other")
	if err != nil || again.Public() != key.Public() {
		t.Fatalf("the key is not the one that was kept: %v", err)
	}
	g, stranger := newLog(t, "tagout/test/x"), newLog(t, "tagout/test/y")
	ask := func(body string) (int, string) {
		t.Helper()
		w := httptest.NewRecorder()
		New(dir, key, g.key).ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/add-checkpoint", strings.NewReader(body)))
		return w.Code, w.Body.String()
	}
	want := func(what string, status int, body string) {
		t.Helper()
		if code, answer := ask(body); code != status {
			t.Errorf("%s: %d %s, want %d", what, code, answer, status)
		}
	}
	g.add(t, "a", "b", "c")
	want("the first", http.StatusOK, g.request(t, 0))
	want("the same again", http.StatusOK, g.request(t, 3))
	if code, answer := ask(g.request(t, 0)); code != http.StatusConflict || answer != "3\n" {
		t.Errorf("with another old size: %d %q", code, answer)
	}
	forked := newLog(t, "tagout/test/x")
	forked.signer = g.signer
	forked.key = g.key
	forked.add(t, "a", "B", "c", "d")
	g.add(t, "d", "e")
	want("a proof of another log", http.StatusUnprocessableEntity, forked.request(t, 3))
	want("growth", http.StatusOK, g.request(t, 3))
	back := newLog(t, "tagout/test/x")
	back.signer, back.key = g.signer, g.key
	back.add(t, "a", "b", "c", "d")
	want("a log that was set back", http.StatusConflict, back.request(t, 4))
	want("more than there is", http.StatusBadRequest, strings.Replace(g.request(t, 5), "old 5", "old 99", 1))
	same := newLog(t, "tagout/test/x")
	same.signer, same.key = g.signer, g.key
	same.add(t, "a", "b", "c", "d", "E")
	want("another log of the same size", http.StatusConflict, same.request(t, 5))
	want("a log that is not known", http.StatusNotFound, stranger.request(t, 0))
	imposter := newLog(t, "tagout/test/x")
	imposter.add(t, "a")
	want("another key", http.StatusForbidden, imposter.request(t, 0))
}

func FuzzRequest(f *testing.F) {
	g := newLog(f, "tagout/test/x")
	g.add(f, "a", "b")
	f.Add([]byte(g.request(f, 0)))
	f.Add([]byte("old 1\nAAAA\n\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		_, proof, signed, err := parseRequest(raw)
		if err != nil {
			return
		}
		if len(proof) > 63 {
			t.Errorf("a proof of %d hashes", len(proof))
		}
		if c, err := audit.OpenCheckpoint(signed, g.key); err == nil && c.Size != 2 {
			t.Errorf("it was never signed: %+v", c)
		}
	})
}
