// Package witness keeps checkpoints of other machines' audit logs and signs those that only grew: a C2SP tlog-witness. It
// belongs on a machine that root on the box does not reach.
package witness

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"tagout/internal/atomicfile"
	"tagout/internal/audit"
)

// algCosign is the type of keys that sign with the time (C2SP tlog-cosignature).
const algCosign = 4

// Key signs checkpoints.
type Key struct {
	name string
	hash []byte
	key  ed25519.PrivateKey
}

// NewKey makes a key. The name is one word without a plus, often a host's name.
func NewKey(name string) (*Key, error) {
	if name == "" || strings.ContainsAny(name, "+ \t\r\n") {
		return nil, fmt.Errorf("%q cannot name a witness: write one word without a plus", name)
	}
	seed := make([]byte, ed25519.SeedSize)
	if _, err := rand.Read(seed); err != nil {
		return nil, err
	}
	return keyOf(name, seed), nil
}

func keyOf(name string, seed []byte) *Key {
	k := &Key{name: name, key: ed25519.NewKeyFromSeed(seed)}
	sum := sha256.Sum256(append([]byte(name+"\n"), k.public()...))
	k.hash = sum[:4]
	return k
}

func (k *Key) public() []byte {
	return append([]byte{algCosign}, k.key.Public().(ed25519.PublicKey)...) // its type is documented
}

// Public is the key that logs are configured with: NAME+HASH+KEY.
func (k *Key) Public() string {
	return k.name + "+" + hex.EncodeToString(k.hash) + "+" + base64.StdEncoding.EncodeToString(k.public())
}

// OpenKey loads the key in a file, or makes one there.
func OpenKey(path, name string) (*Key, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		k, err := NewKey(name)
		if err != nil {
			return nil, err
		}
		text := k.name + "\n" + base64.StdEncoding.EncodeToString(k.key.Seed()) + "\n"
		if err := atomicfile.WriteSynced(path, []byte(text), 0o600, -1, -1); err != nil {
			return nil, fmt.Errorf("keeping the witness's key: %w", err)
		}
		return k, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the witness's key: %w", err)
	}
	have, encoded, _ := strings.Cut(strings.TrimSpace(string(raw)), "\n")
	seed, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil || len(seed) != ed25519.SeedSize {
		return nil, fmt.Errorf("reading the witness's key: %s holds none", path)
	}
	return keyOf(have, seed), nil
}

// sign returns the signature's line for a checkpoint's text.
func (k *Key) sign(text string, now time.Time) string {
	when := uint64(now.Unix())
	sig := ed25519.Sign(k.key, fmt.Appendf(nil, "cosignature/v1\ntime %d\n%s", when, text))
	raw := binary.BigEndian.AppendUint64(bytes.Clone(k.hash), when)
	return "— " + k.name + " " + base64.StdEncoding.EncodeToString(append(raw, sig...)) + "\n"
}

// Server is a witness of the logs with the given keys.
type Server struct {
	dir  string
	key  *Key
	logs map[string]note.Verifier // by origin

	mu sync.Mutex // one checkpoint at a time
}

// CheckpointsFile is the file, in the server's directory, with everything that it signed; `tagout audit verify --witness`
// reads it.
const CheckpointsFile = "checkpoints"

// New returns a witness that keeps what it saw in dir, which must exist.
func New(dir string, key *Key, logs ...note.Verifier) *Server {
	s := &Server{dir: dir, key: key, logs: map[string]note.Verifier{}}
	for _, l := range logs {
		s.logs[l.Name()] = l
	}
	return s
}

// maxRequest bounds a request: a checkpoint and 63 hashes.
const maxRequest = 32 << 10

// ServeHTTP takes POST …/add-checkpoint.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost || !strings.HasSuffix(r.URL.Path, "/add-checkpoint") {
		http.NotFound(w, r)
		return
	}
	raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
	if err != nil {
		http.Error(w, "the request cannot be read", http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	status, answer := s.add(raw)
	if status == http.StatusConflict {
		w.Header().Set("Content-Type", "text/x.tlog.size")
	}
	w.WriteHeader(status)
	io.WriteString(w, answer) // who hung up asks again
}

// add answers one request. s.mu is held.
func (s *Server) add(raw []byte) (status int, answer string) {
	old, proof, signed, err := parseRequest(raw)
	if err != nil {
		return http.StatusBadRequest, err.Error() + "\n"
	}
	claimed, err := audit.ParseCheckpoint(string(signed))
	if err != nil {
		return http.StatusBadRequest, err.Error() + "\n"
	}
	key, ok := s.logs[claimed.Origin]
	if !ok {
		return http.StatusNotFound, "this log is not known here\n"
	}
	c, err := audit.OpenCheckpoint(signed, key)
	if err != nil {
		return http.StatusForbidden, err.Error() + "\n"
	}
	if old > c.Size {
		return http.StatusBadRequest, "the old size is greater than the checkpoint's\n"
	}
	seen, err := s.seen(c.Origin)
	if err != nil {
		return http.StatusInternalServerError, "what was seen of this log cannot be read\n"
	}
	if old != seen.Size {
		return http.StatusConflict, strconv.FormatUint(seen.Size, 10) + "\n"
	}
	switch {
	case c.Size == seen.Size && seen.Size > 0 && c.Root != seen.Root:
		return http.StatusConflict, strconv.FormatUint(seen.Size, 10) + "\n"
	case seen.Size > 0 && c.Size > seen.Size:
		if tlog.CheckTree(proof, int64(c.Size), tlog.Hash(c.Root), int64(seen.Size), tlog.Hash(seen.Root)) != nil {
			return http.StatusUnprocessableEntity, "the log was rewritten: the proof does not lead from what was seen\n"
		}
	}
	if err := s.keep(c, signed); err != nil {
		return http.StatusInternalServerError, "the checkpoint cannot be kept\n"
	}
	text, _, _ := strings.Cut(string(signed), "\n\n")
	return http.StatusOK, s.key.sign(text+"\n", time.Now())
}

func parseRequest(raw []byte) (old uint64, proof tlog.TreeProof, signed []byte, err error) {
	head, signed, ok := bytes.Cut(raw, []byte("\n\n"))
	lines := strings.Split(string(head), "\n")
	size, isOld := strings.CutPrefix(lines[0], "old ")
	if !ok || !isOld || len(lines) > 1+63 {
		return 0, nil, nil, errors.New("a request is a line with the old size, at most 63 hashes, an empty line and a checkpoint")
	}
	if old, err = strconv.ParseUint(size, 10, 63); err != nil {
		return 0, nil, nil, errors.New("the old size is no number")
	}
	for _, line := range lines[1:] {
		h, err := tlog.ParseHash(line)
		if err != nil {
			return 0, nil, nil, errors.New("a line of the proof is no hash")
		}
		proof = append(proof, h)
	}
	return old, proof, signed, nil
}

// file is where the newest checkpoint of a log is kept.
func (s *Server) file(origin string) string {
	sum := sha256.Sum256([]byte(origin))
	return filepath.Join(s.dir, "log-"+hex.EncodeToString(sum[:8]))
}

// seen is the newest checkpoint of a log; one of nothing where none was seen.
func (s *Server) seen(origin string) (audit.Checkpoint, error) {
	raw, err := os.ReadFile(s.file(origin))
	if errors.Is(err, fs.ErrNotExist) {
		return audit.Checkpoint{}, nil
	}
	if err != nil {
		return audit.Checkpoint{}, err
	}
	return audit.ParseCheckpoint(string(raw))
}

// keep has the checkpoint on disk when it returns: it is signed after.
func (s *Server) keep(c audit.Checkpoint, signed []byte) error {
	line, err := json.Marshal(map[string]string{"time": time.Now().UTC().Format(time.RFC3339), "log": c.Origin, "note": string(signed)})
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(s.dir, CheckpointsFile), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n'))
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return atomicfile.WriteSynced(s.file(c.Origin), signed, 0o600, -1, -1)
}
