package evidence

import (
	"archive/zip"
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"tagout/internal/audit"
	"tagout/internal/authority"
)

// Checked says what was found in a file of evidence.
type Checked struct {
	Kind     string   `json:"kind"`
	Who      string   `json:"who"`
	Records  int      `json:"records"`
	Missing  []string `json:"missing,omitempty"` // what the file itself says that it lacks
	Keys     []string `json:"keys"`              // that it is signed with, NAME+HASH
	Problems []string `json:"problems,omitempty"`
}

const (
	mostFiles = 10_000
	mostBytes = 1 << 30 // unpacked
)

// Verify checks a file of evidence with nothing but itself and the keys that are trusted, public ones by their names; of
// those that nobody gave, the file's own are taken. An error means that it could not be read; what is wrong in it is in
// Problems.
func Verify(file io.ReaderAt, length int64, trusted map[string]string) (*Checked, error) {
	files, err := unpack(file, length)
	if err != nil {
		return nil, fmt.Errorf("reading the evidence: %w", err)
	}
	v := &verifier{files: files, trusted: trusted}
	v.manifest()
	var all [][]byte
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if daemon, ok := strings.CutPrefix(strings.TrimSuffix(name, ".jsonl"), recordsDir); ok {
			all = append(all, v.log(daemon)...)
		}
	}
	if !sameLines(all, lines(files[TimelineFile])) {
		v.wrong("the timeline has other records than those that are proven")
	}
	v.Records = len(all)
	var sheet worksheet
	if json.Unmarshal(files["worksheet.json"], &sheet) != nil {
		v.wrong("there is no worksheet")
	}
	v.Kind, v.Who, v.Missing = sheet.Kind, sheet.Who, sheet.Missing
	return &v.Checked, nil
}

type verifier struct {
	Checked
	files   map[string][]byte
	trusted map[string]string
}

func (v *verifier) wrong(format string, args ...any) {
	v.Problems = append(v.Problems, fmt.Sprintf(format, args...))
}

// unpack reads every file once; names that occur twice, or that lead anywhere, are none of ours.
func unpack(file io.ReaderAt, length int64) (map[string][]byte, error) {
	z, err := zip.NewReader(file, length)
	if err != nil {
		return nil, err
	}
	if len(z.File) > mostFiles {
		return nil, errors.New("it holds too many files")
	}
	out, left := map[string][]byte{}, int64(mostBytes)
	for _, f := range z.File {
		if _, twice := out[f.Name]; twice || strings.Contains(f.Name, "..") || strings.HasPrefix(f.Name, "/") || strings.ContainsAny(f.Name, "\\\n") {
			return nil, fmt.Errorf("%q is not a name that evidence has", f.Name)
		}
		r, err := f.Open()
		if err != nil {
			return nil, err
		}
		raw, err := io.ReadAll(io.LimitReader(r, left+1))
		if err = errors.Join(err, r.Close()); err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name, err)
		}
		if left -= int64(len(raw)); left < 0 {
			return nil, errors.New("it is larger than evidence is")
		}
		out[f.Name] = raw
	}
	return out, nil
}

// key returns the key called name: the trusted one, or else the file's.
func (v *verifier) key(name string) (string, bool) {
	own := strings.TrimSpace(string(v.files[keysDir+name+".pub"]))
	k, trusted := v.trusted[name]
	if !trusted {
		k = own
	} else if k != own {
		v.wrong("the key of %s in the file is not the one that was given", name)
	}
	if _, err := rawKey(k); err != nil {
		v.wrong("there is no key of %s", name)
		return "", false
	}
	if pemText, err := pemOf(k); err == nil && own == k && !bytes.Equal(pemText, v.files[keysDir+name+".pem"]) {
		v.wrong("keys/%s.pem is another key than keys/%s.pub", name, name)
	}
	v.Keys = append(v.Keys, authority.KeyID(k))
	return k, true
}

func (v *verifier) manifest() {
	named := map[string]bool{ManifestFile: true, SignatureFile: true}
	for _, l := range lines(v.files[ManifestFile]) {
		sum, name, _ := strings.Cut(string(l), "  ")
		named[name] = true
		got := sha256.Sum256(v.files[name])
		if _, there := v.files[name]; !there {
			v.wrong("%s is missing", name)
		} else if hex.EncodeToString(got[:]) != sum {
			v.wrong("%s is not the file that the manifest names", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(v.files)) {
		if !named[name] {
			v.wrong("%s is not in the manifest", name)
		}
	}
	k, ok := v.key(boxKey)
	if !ok {
		return
	}
	raw, err := rawKey(k)
	if err != nil || !ed25519.Verify(raw, v.files[ManifestFile], v.files[SignatureFile]) {
		v.wrong("the manifest is not signed with the box's key")
	}
}

// log checks one log's records and returns them.
func (v *verifier) log(daemon string) [][]byte {
	records, proofs := lines(v.files[recordsDir+daemon+".jsonl"]), lines(v.files[proofsDir+daemon+".proofs"])
	k, ok := v.key(daemon)
	if !ok {
		return records
	}
	key, err := note.NewVerifier(k)
	var c audit.Checkpoint
	if err == nil {
		c, err = audit.OpenCheckpoint(v.files[proofsDir+daemon+".checkpoint"], key)
	}
	if err != nil {
		v.wrong("the checkpoint of %s: %v", daemon, err)
		return records
	}
	if len(proofs) != len(records) {
		v.wrong("%s has %d records and %d proofs", daemon, len(records), len(proofs))
	}
	for i := range min(len(records), len(proofs)) {
		if err := checkProof(c, records[i], string(proofs[i])); err != nil {
			v.wrong("line %d of %s%s.jsonl: %v", i+1, recordsDir, daemon, err)
		}
	}
	return records
}

func checkProof(c audit.Checkpoint, record []byte, proof string) error {
	parts := strings.Split(proof, " ")
	index, err := strconv.ParseUint(parts[0], 10, 62)
	if err != nil || index >= c.Size || len(parts) > 65 {
		return errors.New("its proof is none")
	}
	var hashes tlog.RecordProof
	for _, p := range parts[1:] {
		raw, err := base64.StdEncoding.DecodeString(p)
		if err != nil || len(raw) != len(tlog.Hash{}) {
			return errors.New("its proof is none")
		}
		hashes = append(hashes, tlog.Hash(raw))
	}
	if tlog.CheckRecord(hashes, int64(c.Size), tlog.Hash(c.Root), int64(index), tlog.RecordHash(record)) != nil {
		return errors.New("it is not the record that was signed")
	}
	return nil
}

// lines are the lines of a file, each with an end.
func lines(raw []byte) [][]byte {
	if len(raw) == 0 {
		return nil
	}
	return bytes.Split(bytes.TrimSuffix(raw, []byte{'\n'}), []byte{'\n'})
}

func sameLines(a, b [][]byte) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.SortFunc(a, bytes.Compare)
	slices.SortFunc(b, bytes.Compare)
	return slices.EqualFunc(a, b, bytes.Equal)
}
