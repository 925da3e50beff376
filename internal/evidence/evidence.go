// Package evidence packs what the logs and the box know of a session, a stop or a drill into one file for an auditor: the
// worksheet filled in, the timeline, the records with proofs that they are the ones the daemons signed, the public keys,
// and how to check all of it with sha256sum, openssl and python. It reads the logs themselves and no index.
//
// The same logs give the same file, byte for byte. What is missing is named: a file that lacks something is written only
// where that was asked for, and says so itself.
package evidence

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"

	"tagout/internal/audit"
	"tagout/internal/auditview"
	"tagout/internal/card"
	"tagout/internal/config"
	"tagout/internal/drillhistory"
)

// Config says where to look. All fields but Box, Unseal and Incomplete must be set.
type Config struct {
	AuditDir string // inst.AuditDir()
	CardDir  string // inst.CardDir()
	DrillDir string // instance.DrillDir()
	Box      *config.Box
	Signer   string // private key, as authority.NewKey makes it, that signs the manifest
	Version  string // Tagout's
	Unseal   []audit.Unseal
	// Incomplete lets a file be written that lacks something.
	Incomplete bool
}

// Missing is what a file would lack. It is an error where nobody said that it may.
type Missing []string

func (m Missing) Error() string {
	return "the evidence is not complete: " + strings.Join(m, "; ") + "; --incomplete writes it all the same, and says so in it"
}

// Waits says that some of it is only not signed yet: daemons sign what they wrote every few seconds.
func (m Missing) Waits() bool {
	return slices.ContainsFunc(m, func(s string) bool { return strings.HasSuffix(s, notSignedYet) })
}

const notSignedYet = "yet: try again in some seconds"

// ErrUnknown is the error of evidence of something that neither logs nor drills know.
var ErrUnknown = errors.New("neither the logs nor the drills know it")

// Names in the file.
const (
	ManifestFile  = "manifest.sha256"
	SignatureFile = "manifest.sha256.sig"
	TimelineFile  = "timeline.jsonl"
	recordsDir    = "records/"
	proofsDir     = "proofs/"
	keysDir       = "keys/"
	boxKey        = "manifest" // names the key that signs the manifest
)

//go:embed verify.py
var verifyScript []byte

// bundle is a file in the making.
type bundle struct {
	cfg     Config
	files   map[string][]byte
	missing Missing
	sheet   worksheet
}

func (b *bundle) lack(format string, args ...any) {
	b.missing = append(b.missing, fmt.Sprintf(format, args...))
}

// Write packs the evidence of who, a session (or a kid of one session), a stop or a drill, into out. It returns what the
// file lacks.
func Write(ctx context.Context, cfg Config, who string, out io.Writer) (Missing, error) {
	b := &bundle{cfg: cfg, files: map[string][]byte{}}
	err := b.gather(ctx, who)
	if err != nil {
		return nil, fmt.Errorf("gathering the evidence of %s: %w", who, err)
	}
	if len(b.missing) > 0 && !cfg.Incomplete {
		return b.missing, b.missing
	}
	if err := b.finish(); err != nil {
		return b.missing, fmt.Errorf("writing the evidence of %s: %w", who, err)
	}
	return b.missing, b.pack(out)
}

func (b *bundle) gather(ctx context.Context, who string) error {
	story, err := auditview.Tell(ctx, auditview.Scanner{Dir: b.cfg.AuditDir, Unseal: b.cfg.Unseal}, who)
	if err != nil && !errors.Is(err, auditview.ErrNoLogs) {
		return err
	}
	drills, err := drillhistory.List(b.cfg.DrillDir)
	if err != nil {
		return err
	}
	b.sheet.Version = b.cfg.Version
	if story == nil {
		for _, d := range drills {
			if d.ID == who {
				return b.drillAlone(d)
			}
		}
		return ErrUnknown
	}
	if story.Kind == auditview.KindKid && len(story.Sessions) != 1 {
		return fmt.Errorf("%d sessions had this name: name one of %s", len(story.Sessions), strings.Join(story.Sessions, ", "))
	}
	if err := b.story(story); err != nil {
		return err
	}
	if err := b.cards(story); err != nil {
		return err
	}
	_, last := story.Span()
	if err := b.lastDrill(drills, last); err != nil {
		return err
	}
	b.box()
	return nil
}

// story adds the timeline and the records with their proofs.
func (b *bundle) story(s *auditview.Story) error {
	b.sheet.fill(s)
	if s.Stats.Sealed > 0 {
		b.lack("%d encrypted pieces of the logs could not be read: name who can read them with --identity", s.Stats.Sealed)
	}
	if s.Stats.Unreadable > 0 {
		b.lack("%d lines of the logs are no records", s.Stats.Unreadable)
	}
	if s.Kind != auditview.KindStop && !slices.ContainsFunc(s.Lines, func(l auditview.Line) bool { return l.Event == audit.EventKidSpawned }) {
		b.lack("the session's beginning is in no log")
	}
	for _, stop := range s.Stops {
		for _, event := range []string{audit.EventStopReceived, audit.EventStopCompleted} {
			if !slices.ContainsFunc(s.Lines, func(l auditview.Line) bool { return l.Event == event && l.Fields["stop"] == stop }) {
				b.lack("no log has the record %s of stop %s", event, stop)
			}
		}
	}
	var page, all bytes.Buffer
	if err := s.HTML(&page); err != nil {
		return err
	}
	logs := map[string][]auditview.Line{}
	for _, l := range s.Lines {
		all.Write(append(slices.Clip(l.Raw), '\n'))
		daemon := filepath.Base(strings.TrimSuffix(filepath.Dir(l.Log), "/shards"))
		logs[daemon] = append(logs[daemon], l)
	}
	b.files["timeline.html"], b.files[TimelineFile] = page.Bytes(), all.Bytes()
	for _, daemon := range slices.Sorted(maps.Keys(logs)) {
		if err := b.prove(daemon, logs[daemon]); err != nil {
			return err
		}
	}
	return nil
}

// cards adds the text of every card that was in force.
func (b *bundle) cards(s *auditview.Story) error {
	sums := map[string]string{} // sha256 -> name
	for _, l := range s.Lines {
		if l.CardSHA256 != "" {
			sums[l.CardSHA256] = l.Card
		}
		if h := l.Fields["card_hash"]; h != "" && l.Event == audit.EventPolicyChanged && l.Outcome == audit.OutcomeOK {
			sums[h] = l.Card
		}
	}
	if len(sums) == 0 {
		b.lack("no record names the card")
		return nil
	}
	for _, sum := range slices.Sorted(maps.Keys(sums)) {
		raw, err := os.ReadFile(filepath.Join(b.cfg.CardDir, sum+".yaml"))
		got := sha256.Sum256(raw)
		if err != nil || hex.EncodeToString(got[:]) != sum {
			b.lack("the text of card %s (sha256 %s) was not kept", sums[sum], sum)
			continue
		}
		b.files["cards/"+sum+".yaml"] = raw
		c, err := card.ParseAt("card.yaml", raw, time.Time{}) // what it allowed then, whatever has expired since
		if err != nil {
			b.lack("the card %s (sha256 %s) cannot be read by this version: %v", sums[sum], sum, err)
			continue
		}
		b.sheet.card(c)
	}
	return nil
}

// lastDrill adds the last whole drill that had passed by then.
func (b *bundle) lastDrill(drills []drillhistory.Entry, by time.Time) error {
	for _, d := range slices.Backward(drills) {
		if d.Passed() && d.Started.Before(by) {
			return b.drill(d)
		}
	}
	b.lack("no whole drill had passed by then")
	return nil
}

func (b *bundle) drillAlone(d drillhistory.Entry) error {
	b.sheet.Kind, b.sheet.Who = "drill", d.ID
	return b.drill(d)
}

// drill adds a drill: what the machine's history has of it and the report that was signed.
func (b *bundle) drill(d drillhistory.Entry) error {
	raw, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		return err
	}
	b.files["drill/history.json"] = append(raw, '\n')
	b.sheet.Drill = &d
	if d.Report == "" {
		b.lack("drill %s left no signed report", d.ID)
		return nil
	}
	for _, name := range []string{"drill.json", "drill.html", "drill.note"} {
		raw, err := os.ReadFile(filepath.Join(d.Report, name))
		if err != nil {
			b.lack("the report of drill %s is not there any more: %v", d.ID, err)
			continue
		}
		sum := sha256.Sum256(raw)
		if name == "drill.json" && hex.EncodeToString(sum[:]) != d.SHA256 {
			b.lack("the report of drill %s was changed: %s is not what the history has", d.ID, filepath.Join(d.Report, name))
		}
		b.files["drill/"+name] = raw
	}
	if d.Key != "" {
		b.files[keysDir+"drill.pub"] = []byte(d.Key + "\n")
	}
	return nil
}

// box adds where denied attempts are told, and who may stop and release.
func (b *bundle) box() {
	if b.cfg.Box == nil {
		b.lack("the box has no configuration")
		return
	}
	b.sheet.box(b.cfg.Box)
}

// finish adds what is made of everything else.
func (b *bundle) finish() error {
	b.sheet.Missing = b.missing
	raw, err := json.MarshalIndent(b.sheet, "", "  ")
	if err != nil {
		return err
	}
	b.files["worksheet.json"] = append(raw, '\n')
	var page bytes.Buffer
	if err := sheetPage.Execute(&page, &b.sheet); err != nil {
		return err
	}
	b.files["worksheet.html"] = page.Bytes()
	b.files["verify.py"] = verifyScript
	signer, err := note.NewSigner(b.cfg.Signer)
	if err != nil {
		return errors.New("the key that signs the manifest is none")
	}
	public, pem, err := publicOf(b.cfg.Signer)
	if err != nil {
		return err
	}
	b.files[keysDir+boxKey+".pub"], b.files[keysDir+boxKey+".pem"] = []byte(public+"\n"), pem
	b.files["README.txt"] = b.readme(public)
	var manifest bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(b.files)) {
		fmt.Fprintf(&manifest, "%x  %s\n", sha256.Sum256(b.files[name]), name)
	}
	b.files[ManifestFile] = manifest.Bytes()
	b.files[SignatureFile], err = signer.Sign(manifest.Bytes())
	return err
}

// pack writes the zip: names in order, no time of its making.
func (b *bundle) pack(out io.Writer) error {
	z := zip.NewWriter(out)
	for _, name := range slices.Sorted(maps.Keys(b.files)) {
		w, err := z.CreateHeader(&zip.FileHeader{Name: name, Method: zip.Deflate, Modified: time.Date(1980, 1, 1, 0, 0, 0, 0, time.UTC)})
		if err == nil {
			_, err = w.Write(b.files[name])
		}
		if err != nil {
			return fmt.Errorf("writing the evidence: %w", err)
		}
	}
	if err := z.Close(); err != nil {
		return fmt.Errorf("writing the evidence: %w", err)
	}
	return nil
}
