package auditkeep

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"tagout/internal/atomicfile"
	"tagout/internal/audit"
	"tagout/internal/audit/verify"
)

// maxAnswer bounds what is read of a witness's answer.
const maxAnswer = 64 << 10

// poster sends checkpoints as they are.
type poster struct {
	url    string
	client *http.Client
}

func newPoster(url string) *poster {
	return &poster{url, &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}
}

func (p *poster) send(ctx context.Context, o offered) error {
	status, answer, err := p.post(ctx, p.url, o.note)
	switch {
	case err != nil:
		return err
	case status/100 == 2:
		return nil
	case status/100 == 4 && status != http.StatusTooManyRequests && status != http.StatusRequestTimeout:
		return fmt.Errorf("%w: status %d: %.200q", errRefused, status, answer)
	}
	return fmt.Errorf("status %d", status)
}

func (p *poster) post(ctx context.Context, url string, body []byte) (status int, answer []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Content-Type", "text/plain; charset=utf-8")
	resp, err := p.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close() // only read
	answer, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	return resp.StatusCode, answer, err
}

// cosigner speaks C2SP's tlog-witness: it shows that the log only grew, and keeps the witness's signature.
type cosigner struct {
	*poster
	dir  string // of the logs
	name string // of the witness, in files
	key  cosignKey

	mu  sync.Mutex
	old map[string]uint64 // daemon -> records that the witness has seen
}

func newCosigner(w Witness, dir string) (*cosigner, error) {
	key, err := parseCosignKey(w.Key)
	if err != nil {
		return nil, err
	}
	return &cosigner{poster: newPoster(strings.TrimSuffix(w.URL, "/") + "/add-checkpoint"), dir: dir, name: w.Name, key: key, old: map[string]uint64{}}, nil
}

func (c *cosigner) send(ctx context.Context, o offered) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for range 2 { // the second time with what the witness says it has seen
		body, err := c.body(o)
		if err != nil {
			return err
		}
		status, answer, err := c.post(ctx, c.url, body)
		if err != nil {
			return err
		}
		switch {
		case status == http.StatusOK:
			return c.keep(o, answer)
		case status == http.StatusConflict:
			seen, err := strconv.ParseUint(strings.TrimSpace(string(answer)), 10, 63)
			if err != nil {
				return fmt.Errorf("%w: status %d: %.200q", errRefused, status, answer)
			}
			c.old[o.daemon] = seen
		case status/100 == 4 && status != http.StatusTooManyRequests:
			return fmt.Errorf("%w: status %d: %.200q", errRefused, status, answer)
		default:
			return fmt.Errorf("status %d", status)
		}
	}
	return errors.New("it does not say twice the same of what it has seen")
}

// body is the request for one checkpoint.
func (c *cosigner) body(o offered) ([]byte, error) {
	cp, err := audit.ParseCheckpoint(string(o.note))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errRefused, err)
	}
	old := c.old[o.daemon]
	if old > cp.Size {
		return nil, fmt.Errorf("%w: it has seen %d records of this log, and the checkpoint covers %d: the log was set back", errRefused, old, cp.Size)
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "old %d\n", old)
	if old > 0 && old < cp.Size {
		tree, err := audit.OpenTree(c.dir, o.daemon)
		if err != nil {
			return nil, err
		}
		proof, err := verify.Consistency(tree, old, cp.Size)
		tree.Close() // only read
		if err != nil {
			return nil, err
		}
		for _, h := range proof {
			b.WriteString(base64.StdEncoding.EncodeToString(h[:]) + "\n")
		}
	}
	b.WriteByte('\n')
	b.Write(o.note)
	return b.Bytes(), nil
}

// keep checks the witness's signature and keeps the checkpoint with it.
func (c *cosigner) keep(o offered, answer []byte) error {
	text, _, _ := strings.Cut(string(o.note), "\n\n")
	line, err := c.key.find(text+"\n", answer)
	if err != nil {
		return fmt.Errorf("%w: %w", errRefused, err)
	}
	dir := filepath.Join(c.dir, CosignedDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	file := filepath.Join(dir, o.daemon+"."+c.name)
	if err := atomicfile.Write(file, append(bytes.Clone(o.note), line+"\n"...), 0o644, -1, -1); err != nil {
		return err
	}
	if cp, err := audit.ParseCheckpoint(string(o.note)); err == nil {
		c.old[o.daemon] = cp.Size
	}
	return nil
}

// CosignedDir holds, below inst.AuditDir(), each log's newest checkpoint with a witness's signature: DAEMON.WITNESS.
const CosignedDir = "cosigned"

// cosignKey is a witness's key: Ed25519 over a checkpoint with the time (C2SP tlog-cosignature).
type cosignKey struct {
	name string
	hash uint32
	key  ed25519.PublicKey
}

// algCosign is the type of such keys.
const algCosign = 4

func parseCosignKey(s string) (cosignKey, error) {
	name, rest, ok := strings.Cut(s, "+")
	hash, encoded, ok2 := strings.Cut(rest, "+")
	raw, err := base64.StdEncoding.DecodeString(encoded)
	h, hexErr := hex.DecodeString(hash)
	if !ok || !ok2 || err != nil || hexErr != nil || len(h) != 4 || len(raw) != 1+ed25519.PublicKeySize || raw[0] != algCosign {
		return cosignKey{}, errors.New("its key is not of a witness: it is NAME+HASH+KEY, of the type that signs with the time")
	}
	want := sha256.Sum256(append([]byte(name+"\n"), raw...))
	if !bytes.Equal(want[:4], h) {
		return cosignKey{}, errors.New("its key's hash is not that of the key: was it copied whole?")
	}
	return cosignKey{name: name, hash: binary.BigEndian.Uint32(h), key: raw[1:]}, nil
}

// find returns the line among a witness's signatures that is its signature of the text.
func (k cosignKey) find(text string, answer []byte) (string, error) {
	for line := range strings.Lines(string(answer)) {
		line = strings.TrimSuffix(line, "\n")
		rest, ok := strings.CutPrefix(line, "— "+k.name+" ")
		raw, err := base64.StdEncoding.DecodeString(rest)
		if !ok || err != nil || len(raw) != 4+8+ed25519.SignatureSize || binary.BigEndian.Uint32(raw) != k.hash {
			continue
		}
		when := binary.BigEndian.Uint64(raw[4:])
		msg := fmt.Sprintf("cosignature/v1\ntime %d\n%s", when, text)
		if ed25519.Verify(k.key, []byte(msg), raw[12:]) {
			return line, nil
		}
	}
	return "", errors.New("its answer holds no signature by its key")
}
