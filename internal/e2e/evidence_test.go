package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/mod/sumdb/note"

	"tagout/internal/audit"
	"tagout/internal/config"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// TestAuditCases is case S17 on a box that lives: its logs verify, also after its daemons were killed; a byte that is
// changed, records that are cut off and a day that is replaced are found and located, and what root rewrites with the
// log's own key is shown by the witness alone.
func TestAuditCases(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "witness")
	box := testenv.StartWith(t, func(b *config.Box) {
		b.Audit.Witnesses = []config.Witness{{Name: "elsewhere", Kind: config.WitnessFile, Target: file}}
	})
	kid := box.Spawn(bareCard, nil)
	box.Exec(kid.Name, "/bin/true")
	box.Kill9(instance.Proxy)
	box.Kill9(instance.Sandboxd)
	box.WaitHealthy(instance.Proxy, instance.Sandboxd)
	box.Exec(kid.Name, "/bin/true")
	box.Destroy(kid.Name)
	verified := func(args ...string) string { return box.Must(append([]string{"audit", "verify"}, args...)...) }
	for _, daemon := range instance.Daemons() {
		if out := verified(); !strings.Contains(out, daemon+strings.Repeat(" ", 13-len(daemon))+"ok") {
			t.Errorf("%s is not said to be whole:\n%s", daemon, out)
		}
	}
	box.WaitRecord("the kill in the log of sandboxd", func(r *audit.Record) bool {
		return r.Event == audit.EventGap && r.Daemon == instance.Sandboxd && r.Fields[audit.FieldCause] == "crash"
	})
	witnessed(t, box, file)
	verified("--witness", file)
	if info, err := os.Stat(filepath.Join(box.Inst.AuditDir(), "keys", instance.Proxy+".pub")); err != nil || info.Mode().Perm() != 0o644 || info.Sys().(*syscall.Stat_t).Uid != 0 {
		t.Errorf("the exported key: %v %v", info, err)
	}
	box.StopSupervisor(syscall.SIGTERM) // the end is signed
	verified("--witness", file)
	dir := filepath.Dir(box.Inst.AuditFile(instance.Sandboxd))
	log := box.Inst.AuditFile(instance.Sandboxd)
	raw, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.SplitAfter(bytes.TrimSuffix(raw, []byte("\n")), []byte("\n"))
	last := len(lines) - 1
	harm := func(what, want string, text []byte, args ...string) {
		t.Helper()
		if err := os.WriteFile(log, text, 0o600); err != nil {
			t.Fatal(err)
		}
		out := box.Tagout(append([]string{"audit", "verify"}, args...)...)
		if out.Code != 1 || !strings.Contains(out.Stdout, want) {
			t.Errorf("%s: exit %d, want %q:\n%s%s", what, out.Code, want, out.Stdout, out.Stderr)
		}
	}
	at := last / 2
	harm("one byte changed", fmt.Sprintf("record-changed %d in sandboxd.jsonl at byte %d", at, len(bytes.Join(lines[:at], nil))),
		bytes.Join(append(append(append([][]byte{}, lines[:at]...), bytes.Replace(lines[at], []byte(`"v":1`), []byte(`"v":7`), 1)), lines[at+1:]...), nil))
	harm("the newest records cut off", fmt.Sprintf("tail-cut %d to %d", last-1, last), bytes.Join(lines[:last-1], nil))
	day := bytes.ReplaceAll(raw, []byte(`"event":"kid.spawned"`), []byte(`"event":"kid.refused"`))
	harm("a day replaced", "shard-replaced", bytes.ReplaceAll(day, []byte(`"boot_ns":`), []byte(`"boot_ns":1`)))
	signAnew(t, dir, lines[:4], log)
	if out := verified(); strings.Contains(out, "NOT") {
		t.Errorf("the control, rewritten with the key and without a witness: %s", out)
	}
	out := box.Tagout("audit", "verify", "--witness", file)
	if out.Code != 1 || !strings.Contains(out.Stdout, "tail-cut") {
		t.Errorf("with the witness: exit %d\n%s%s", out.Code, out.Stdout, out.Stderr)
	}
}

// witnessed waits until the witness has a checkpoint of sandboxd's log that covers what is in it by now.
func witnessed(t *testing.T, box *testenv.Box, file string) {
	t.Helper()
	raw, err := os.ReadFile(box.Inst.AuditFile(instance.Sandboxd))
	if err != nil {
		t.Fatal(err)
	}
	box.Until(soon, "the witness has what sandboxd wrote", func() error {
		signed, err := os.ReadFile(filepath.Join(filepath.Dir(box.Inst.AuditFile(instance.Sandboxd)), audit.CheckpointFile))
		if err != nil {
			return err
		}
		c, err := audit.ParseCheckpoint(string(signed))
		if err != nil || c.Size < uint64(bytes.Count(raw, []byte("\n"))) {
			return fmt.Errorf("it is not signed yet: %d %v", c.Size, err)
		}
		kept, err := os.ReadFile(file)
		if err == nil && !strings.Contains(string(kept), strings.Split(c.Text(), "\n")[2]) {
			err = errors.New("it does not have it yet")
		}
		return err
	})
}

// signAnew makes lines all there is of a log, as root can: with its hashes, and signed with its own key.
func signAnew(t *testing.T, dir string, lines [][]byte, log string) {
	t.Helper()
	var tree audit.Tree
	var h audit.LeafHasher
	var hashes []byte
	for _, line := range lines {
		hashes = append(hashes, tree.Add(h.Line(bytes.TrimSuffix(line, []byte("\n"))))...)
	}
	private, err := os.ReadFile(filepath.Join(dir, audit.KeyFile))
	if err != nil {
		t.Fatal(err)
	}
	signer, err := note.NewSigner(strings.TrimSpace(string(private)))
	if err != nil {
		t.Fatal(err)
	}
	signed, err := note.Sign(&note.Note{Text: audit.Checkpoint{Origin: signer.Name(), Size: tree.Size(), Root: tree.Root()}.Text()}, signer)
	if err = errors.Join(err, os.WriteFile(log, bytes.Join(lines, nil), 0o600), os.WriteFile(filepath.Join(dir, audit.HashFile), hashes, 0o600),
		os.WriteFile(filepath.Join(dir, audit.CheckpointFile), signed, 0o600), os.Remove(filepath.Join(dir, audit.CheckpointsFile))); err != nil {
		t.Fatal(err)
	}
}

// TestAFullAuditDisk: below one mark nothing is spawned, with a reason of its own, and what runs goes on; below the next
// the box does as it is told. A stop waits for none of it.
func TestAFullAuditDisk(t *testing.T) {
	t.Parallel()
	for policy, want := range map[string]wire.KidState{config.FullNothing: wire.KidRunning, config.FullFreeze: wire.KidPaused, config.FullStop: wire.KidStopped} {
		t.Run(policy, func(t *testing.T) {
			t.Parallel()
			box := testenv.StartWith(t, func(b *config.Box) {
				b.Audit = config.Audit{WhenFull: policy, WarnBelow: 3 << 20, RefuseBelow: 2 << 20, ActBelow: 1 << 20}
			})
			kid := box.Spawn(bareCard, nil)
			s := &stopCases{cases: &cases{t: t, box: box}}
			s.newDisk(8, box.Inst.AuditDir()).fill() // the logs stay where they are; what is measured is the directory
			box.Until(soon, "nothing is spawned any more", func() error {
				_, err := box.TrySpawn("late", bareCard, nil)
				if err == nil || !strings.Contains(err.Error(), "audit-space") && !strings.Contains(err.Error(), "MiB left") {
					return fmt.Errorf("got %v", err)
				}
				return nil
			})
			box.Until(soon, "the kid is "+string(want), func() error {
				out := box.Must("list", "--json")
				if !strings.Contains(out, `"`+kid.Name+`"`) || !strings.Contains(out, `"`+string(want)+`"`) {
					return errors.New(out)
				}
				return nil
			})
			if rep := box.Stop(wire.StopRequest{Scope: wire.Scope{Kid: kid.Name}, By: practice.Authority, Reason: "test"}); rep.State != wire.StateObserved {
				t.Errorf("a stop meanwhile: %+v", rep)
			}
		})
	}
}
