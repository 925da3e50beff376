package verify

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"tagout/internal/audit"
)

// keeper is the daemon that removes and encrypts closed pieces, and whose log says so.
const keeper = "sandboxd"

// word is what the keeper's log says of all logs.
type word struct {
	expired map[string]uint64 // daemon -> records before this one were removed, their time was over
	sealed  map[string]sealedPiece
}

type sealedPiece struct{ sha256 string }

func (w *word) hear(r *audit.Record) {
	daemon := r.Fields[audit.FieldDaemon]
	switch r.Event {
	case audit.EventExpired:
		if to, err := strconv.ParseUint(r.Fields[audit.FieldTo], 10, 63); err == nil {
			w.expired[daemon] = max(w.expired[daemon], to)
		}
	case audit.EventSealed:
		w.sealed[filepath.Join(daemon, r.Fields[audit.FieldShard])] = sealedPiece{r.Fields[audit.FieldSHA256]}
	}
}

// sealedAs compares an encrypted piece with what was said when it was made; "" is no problem.
func (w *word) sealedAs(daemon string, p *piece) string {
	said, ok := w.sealed[filepath.Join(daemon, filepath.Base(p.Path))]
	if !ok {
		return "" // the record that says so has expired, or was just written: the hashes of its records count
	}
	f, err := os.Open(p.Path)
	if err != nil {
		return err.Error()
	}
	defer f.Close() // only read
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return err.Error()
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != said.sha256 {
		return fmt.Sprintf("its bytes are not those that were encrypted: SHA-256 %s, recorded is %s", got, said.sha256)
	}
	return ""
}
