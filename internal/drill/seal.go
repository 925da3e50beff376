package drill

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"

	"tagout/internal/atomicfile"
	"tagout/internal/authority"
)

// Files of a report. The note is what is signed: it names the other two by what is in them.
const (
	FileJSON = "drill.json"
	FileHTML = "drill.html"
	FileNote = "drill.note"
)

// sealHeader begins the signed text, so that a key's signature on a drill is never one on anything else.
const sealHeader = "tagout-drill/v1"

// maxSeal bounds a note that is read.
const maxSeal = 64 << 10

// Seal writes the report to dir, which is made where it is missing, as JSON and as a page for people, and signs both
// with a private key as `tagout key new` makes it. It returns the digest of the JSON.
func (rep *Report) Seal(dir, private string) (Digest, error) {
	fail := func(err error) (Digest, error) { return Digest{}, fmt.Errorf("writing the drill report: %w", err) }
	signer, err := note.NewSigner(private)
	if err != nil {
		return fail(errors.New("this is no private key as `tagout key new` writes it"))
	}
	raw, err := rep.JSON()
	if err != nil {
		return fail(err)
	}
	page, err := rep.HTML(signer.Name())
	if err != nil {
		return fail(err)
	}
	signed, err := note.Sign(&note.Note{Text: rep.sealText(raw, page)}, signer)
	if err != nil {
		return fail(err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil { // a report is for everybody
		return fail(err)
	}
	for _, f := range []struct {
		name string
		data []byte
	}{{FileJSON, raw}, {FileHTML, page}, {FileNote, signed}} {
		if err := atomicfile.Write(filepath.Join(dir, f.name), f.data, 0o644, -1, -1); err != nil {
			return fail(err)
		}
	}
	return digest(FileJSON, raw), nil
}

// sealText is what is signed.
func (rep *Report) sealText(raw, page []byte) string {
	var b strings.Builder
	fmt.Fprintln(&b, sealHeader)
	line := func(key, value string) {
		fmt.Fprintln(&b, key, strings.Map(func(r rune) rune {
			if r < ' ' {
				return ' ' // one line is one thing
			}
			return r
		}, value))
	}
	line("verdict", string(rep.Verdict))
	line("started", rep.Started.Format(time.RFC3339))
	line("host", rep.Environment.Host)
	line("by", rep.By)
	for name, data := range map[string][]byte{FileJSON: raw, FileHTML: page} { // in any order
		line("file", fmt.Sprintf("%s %d %s", name, len(data), digest(name, data).SHA256))
	}
	return b.String()
}

// Sealed is what a signature vouches for.
type Sealed struct {
	Key     string // name and hash of the key that signed
	Verdict Verdict
	Started string // as it was written
	Host    string
	By      string
	Checked []string // files that are what was signed
	Absent  []string // files that were signed and are not there
}

// Verify checks the report that file, one of the three, belongs to with a public key and nothing else. The error
// says what is wrong; file itself must be there.
func Verify(file, public string) (*Sealed, error) {
	v, err := note.NewVerifier(public)
	if err != nil {
		return nil, errors.New("this is no public key as `tagout key new` prints it")
	}
	dir := filepath.Dir(file)
	raw, err := readSeal(filepath.Join(dir, FileNote))
	if err != nil {
		return nil, err
	}
	n, err := note.Open(raw, note.VerifierList(v))
	if err != nil {
		return nil, sealError(err, public)
	}
	s := &Sealed{Key: authority.KeyID(public)}
	lines := strings.Split(strings.TrimSuffix(n.Text, "\n"), "\n")
	if lines[0] != sealHeader {
		return nil, fmt.Errorf("%s is signed, and is no drill's", FileNote)
	}
	asked, named := filepath.Base(file), filepath.Base(file) == FileNote
	for _, l := range lines[1:] {
		key, value, _ := strings.Cut(l, " ")
		switch key {
		case "verdict":
			s.Verdict = Verdict(value)
		case "started":
			s.Started = value
		case "host":
			s.Host = value
		case "by":
			s.By = value
		case "file":
			name, err := s.check(dir, value)
			if err != nil {
				return nil, err
			}
			named = named || name == asked
		}
	}
	if !named {
		return nil, fmt.Errorf("%s is not a file that was signed: give %s, %s or %s", asked, FileJSON, FileHTML, FileNote)
	}
	for _, name := range s.Absent {
		if name == asked {
			return nil, fmt.Errorf("%s is not there", name)
		}
	}
	return s, nil
}

func readSeal(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there is no %s beside it: the signature is missing", FileNote)
	}
	if err == nil && info.Size() > maxSeal {
		err = fmt.Errorf("%s is too large for one", FileNote)
	}
	if err != nil {
		return nil, err
	}
	return os.ReadFile(path)
}

// sealError says what a note's error means.
func sealError(err error, public string) error {
	var other *note.UnverifiedNoteError
	var invalid *note.InvalidSignatureError
	switch {
	case errors.As(err, &other):
		return fmt.Errorf("%s was signed with another key: %s, and not %s", FileNote, signers(other.Note), authority.KeyID(public))
	case errors.As(err, &invalid):
		return fmt.Errorf("%s was changed after it was signed: the signature of %s does not fit its text", FileNote, invalid.Name)
	}
	return fmt.Errorf("%s is not whole: its end is cut off, or it is no signed note", FileNote)
}

func signers(n *note.Note) string {
	var out []string
	for _, s := range n.UnverifiedSigs {
		out = append(out, authority.SignatureID(s))
	}
	return strings.Join(out, ", ")
}

// check compares a file with its line "NAME SIZE SHA256" in the note.
func (s *Sealed) check(dir, line string) (name string, err error) {
	f := strings.Fields(line)
	if len(f) != 3 || f[0] != FileJSON && f[0] != FileHTML {
		return "", fmt.Errorf("%s is signed, and its line %q names no file of a drill", FileNote, line)
	}
	name = f[0]
	data, err := os.ReadFile(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		s.Absent = append(s.Absent, name)
		return name, nil
	}
	if err != nil {
		return name, err
	}
	sum := sha256.Sum256(data)
	size, err := strconv.Atoi(f[1])
	switch {
	case hex.EncodeToString(sum[:]) == f[2] && err == nil:
		s.Checked = append(s.Checked, name)
		return name, nil
	case len(data) < size:
		return name, fmt.Errorf("%s is not what was signed: %d bytes are missing, its end is cut off or something was taken out", name, size-len(data))
	case len(data) > size:
		return name, fmt.Errorf("%s is not what was signed: %d bytes were added", name, len(data)-size)
	}
	return name, fmt.Errorf("%s is not what was signed: it has the same length, and other content", name)
}
