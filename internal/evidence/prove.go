package evidence

import (
	"bytes"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"tagout/internal/audit"
	"tagout/internal/audit/verify"
	"tagout/internal/auditview"
	"tagout/internal/authority"
)

// prove adds the records of one log, each with the proof that it is in the tree that a checkpoint of the daemon signs.
func (b *bundle) prove(daemon string, lines []auditview.Line) error {
	var records bytes.Buffer
	last := uint64(0)
	for _, l := range lines {
		records.Write(append(l.Raw[:len(l.Raw):len(l.Raw)], '\n'))
		last = max(last, l.Seq)
	}
	b.files[recordsDir+daemon+".jsonl"] = records.Bytes()
	key, text, err := logKey(b.cfg.AuditDir, daemon)
	if err != nil {
		b.lack("there is no key of the log of %s: %v", daemon, err)
		return nil
	}
	signed, c, err := coverAll(b.cfg.AuditDir, daemon, key, last)
	if err != nil {
		b.lack("%v", err)
		return nil
	}
	tree, err := audit.OpenTree(b.cfg.AuditDir, daemon)
	if err != nil {
		b.lack("%v", err)
		return nil
	}
	defer tree.Close() // only read
	proofs, err := proofsOf(tree, c, lines)
	if err != nil {
		b.lack("the log of %s: %v", daemon, err)
		return nil
	}
	b.files[proofsDir+daemon+".proofs"], b.files[proofsDir+daemon+".checkpoint"] = proofs, signed
	pemText, err := pemOf(text)
	if err != nil {
		return err
	}
	b.files[keysDir+daemon+".pub"], b.files[keysDir+daemon+".pem"] = []byte(text+"\n"), pemText
	b.sheet.Logs = append(b.sheet.Logs, logView{Daemon: daemon, Records: len(lines), Covers: c.Size, Key: authority.KeyID(text), Root: base64.StdEncoding.EncodeToString(c.Root[:])})
	return nil
}

// logKey returns the public key of a log: the exported one where there is one.
func logKey(dir, daemon string) (note.Verifier, string, error) {
	keys, err := verify.PublicKeys(dir)
	if err != nil {
		return nil, "", err
	}
	for _, k := range keys {
		if k.Daemon == daemon {
			v, err := note.NewVerifier(k.Key)
			return v, k.Key, err
		}
	}
	return nil, "", errors.New("its daemon has made none")
}

// coverAll returns the smallest checkpoint of a log that covers a record: of the same records it is the same one, however
// much was added since.
func coverAll(dir, daemon string, key note.Verifier, record uint64) (signed []byte, c audit.Checkpoint, err error) {
	var notes [][]byte
	if raw, err := os.ReadFile(filepath.Join(dir, daemon, audit.CheckpointsFile)); err == nil {
		for line := range bytes.Lines(raw) {
			var k audit.KeptCheckpoint
			if json.Unmarshal(line, &k) == nil {
				notes = append(notes, []byte(k.Note))
			}
		}
	}
	if raw, err := os.ReadFile(filepath.Join(dir, daemon, audit.CheckpointFile)); err == nil {
		notes = append(notes, raw)
	}
	for _, n := range notes {
		got, openErr := audit.OpenCheckpoint(n, key)
		if openErr != nil {
			return nil, c, fmt.Errorf("the log of %s has a checkpoint that its key did not sign: run `tagout audit verify`", daemon)
		}
		if got.Size > record && (signed == nil || got.Size < c.Size) {
			signed, c = n, got
		}
	}
	if signed == nil {
		return nil, c, fmt.Errorf("no checkpoint of the log of %s covers its record %d %s", daemon, record, notSignedYet)
	}
	return signed, c, nil
}

// proofsOf writes a line a record: its number, and the hashes that lead from it to the checkpoint's. Each is checked.
func proofsOf(tree *audit.TreeFile, c audit.Checkpoint, lines []auditview.Line) ([]byte, error) {
	read := tlog.HashReaderFunc(func(at []int64) ([]tlog.Hash, error) {
		out := make([]tlog.Hash, len(at))
		for i, index := range at {
			h, err := tree.At(uint64(index))
			if err != nil {
				return nil, err
			}
			out[i] = tlog.Hash(h)
		}
		return out, nil
	})
	var b bytes.Buffer
	for _, l := range lines {
		proof, err := tlog.ProveRecord(int64(c.Size), int64(l.Seq), read)
		if err == nil {
			err = tlog.CheckRecord(proof, int64(c.Size), tlog.Hash(c.Root), int64(l.Seq), tlog.RecordHash(l.Raw))
		}
		if err != nil {
			return nil, fmt.Errorf("record %d is not the one that was signed (%w): run `tagout audit verify`", l.Seq, err)
		}
		b.WriteString(strconv.FormatUint(l.Seq, 10))
		for _, h := range proof {
			b.WriteByte(' ')
			b.WriteString(base64.StdEncoding.EncodeToString(h[:]))
		}
		b.WriteByte('\n')
	}
	return b.Bytes(), nil
}

// publicOf returns the public half of a private key, as a note's and as PEM.
func publicOf(private string) (public string, pemText []byte, err error) {
	if public, err = authority.Public(private); err == nil {
		pemText, err = pemOf(public)
	}
	return public, pemText, err
}

// pemOf is a note's Ed25519 public key as openssl reads it.
func pemOf(key string) ([]byte, error) {
	raw, err := rawKey(key)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKIXPublicKey(raw)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), nil
}

// rawKey reads NAME+HASH+BASE64; base64 has a + of its own.
func rawKey(key string) (ed25519.PublicKey, error) {
	_, rest, _ := strings.Cut(strings.TrimSpace(key), "+")
	_, data, _ := strings.Cut(rest, "+")
	raw, err := base64.StdEncoding.DecodeString(data)
	if err != nil || len(raw) != 1+ed25519.PublicKeySize || raw[0] != 1 {
		return nil, fmt.Errorf("%.40q is no Ed25519 key", key)
	}
	return raw[1:], nil
}
