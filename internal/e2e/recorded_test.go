package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/testenv"
)

// callingCard lets a kid fetch from one host.
const callingCard = bareCard + `egress:
  allow:
    - {host: files.vendor.test, ports: [80], protocol: http}
`

// inShort is a record in short, as a story has it.
func inShort(r *audit.Record) string {
	switch r.Event {
	case audit.EventProcessStarted:
		return "ran " + r.Fields["arguments"]
	case audit.EventFileCreated, audit.EventFileChanged, audit.EventFileDeleted:
		return strings.TrimPrefix(r.Event, "file.") + " " + r.Fields["path"]
	case audit.EventFileRenamed:
		return "renamed " + r.Fields["from"] + " to " + r.Fields["path"]
	case audit.EventLookup, audit.EventConnOpened:
		return r.Event + " " + r.Dst.Name + " " + r.Outcome
	case audit.EventConnectDenied:
		return r.Event + " " + r.Dst.Addr.String()
	}
	return r.Event
}

// endOf destroys a kid and waits until its last record is written.
func endOf(box *testenv.Box, kid string) {
	box.T.Helper()
	box.Destroy(kid)
	box.WaitRecord("the end of "+kid, func(r *audit.Record) bool { return r.Kid == kid && r.Event == audit.EventKidDestroyed })
}

// inOrder fails the test unless all of want are in the records of a kid, one after the other.
func inOrder(t *testing.T, records []audit.Record, want []string) {
	t.Helper()
	var all []string
	next := 0
	for i := range records {
		all = append(all, inShort(&records[i]))
		if next < len(want) && all[i] == want[next] {
			next++
		}
	}
	if next < len(want) {
		t.Errorf("%q is not recorded after %q:\n%s", want[next], want[:next], strings.Join(all, "\n"))
	}
}

// TestWhatAKidDoesIsRecorded walks through one kid's life: programs, files, connections. The log has each, with names, in
// order, and the list of what it left behind.
func TestWhatAKidDoesIsRecorded(t *testing.T) {
	t.Parallel()
	box := testenv.Start(t)
	kid := box.Spawn(callingCard, nil).Name
	of := func(r *audit.Record) bool { return r.Kid == kid }
	// One step at a time: what the kernel tells by two ways, of programs and of files, is in order from one step to the next.
	for _, line := range []string{
		"/bin/echo 'two words' $'\\xff\\n'", "echo a >/workspace/a", "mv /workspace/a /workspace/b", "mkdir -p /workspace/d/e", "echo kept >/workspace/d/e/f",
		"exec 3<>/dev/tcp/files.vendor.test/80", "(exec 3<>/dev/tcp/203.0.113.200/81)", "getent hosts nowhere.test", "rm /workspace/b",
		"ln -s /etc/shadow /tmp/link; mkfifo /tmp/pipe; touch $'/tmp/\\e[2J\\xff'",
	} {
		box.Exec(kid, "/bin/bash", "-c", line)
	}
	box.WaitRecord("the last file", func(r *audit.Record) bool { return of(r) && strings.Contains(r.Fields["path"], "[2J") })
	box.WaitRecord("the denied connection", func(r *audit.Record) bool { return of(r) && r.Event == audit.EventConnectDenied })
	endOf(box, kid)
	records := box.Records(of)
	inOrder(t, records, []string{
		audit.EventKidSpawned, `ran /bin/echo "two words" "\xff\n"`, "created /workspace/a", "changed /workspace/a",
		"ran mv /workspace/a /workspace/b", "renamed /workspace/a to /workspace/b", "created /workspace/d", "created /workspace/d/e",
		"created /workspace/d/e/f", "changed /workspace/d/e/f", "dns.lookup files.vendor.test allow", "conn.opened files.vendor.test allow",
		"connect.denied 203.0.113.200", "ran getent hosts nowhere.test", "dns.lookup nowhere.test deny", "ran rm /workspace/b", "deleted /workspace/b",
		"created /tmp/link", "created /tmp/pipe", `created "/tmp/\x1b[2J\xff"`, audit.EventProcessCounts, audit.EventFileManifest, audit.EventKidDestroyed,
	})
	checkCounts(t, records)
	checkManifest(t, records, map[string]string{
		"-rw-r--r-- 5 " + hexSum("kept\n"): "/workspace/d/e/f", "Lrwxrwxrwx 11 -": "/tmp/link", "prw-r--r-- 0 -": "/tmp/pipe",
		"-rw-r--r-- 0 " + hexSum(""): `"/tmp/\x1b[2J\xff"`,
	})
	checkSchema(t, box)
	if len(box.Records(func(r *audit.Record) bool { return r.Event == audit.EventConfigChanged && r.Fields["diff"] != "" })) != 1 {
		t.Error("the box's configuration is not recorded")
	}
	if len(box.Records(func(r *audit.Record) bool {
		return r.Event == audit.EventDaemonStarted && len(r.Fields["config_sha256"]) == 64
	})) < 5 {
		t.Error("not every daemon's configuration is recorded")
	}
	called := box.Records(func(r *audit.Record) bool {
		return r.Event == audit.EventAPICalled && r.Fields["method"] == "POST" && strings.Contains(r.Fields["arguments"], "mv /workspace/a /workspace/b") && r.Kid == kid
	})
	if len(called) != 1 || called[0].Fields["from"] != "unix" || called[0].Actor != "uid:0" || len(called[0].Fields["arguments_sha256"]) != 64 {
		t.Errorf("the call for a command: %+v", called)
	}
	for _, r := range records {
		if r.CardSHA256 != hexSum(callingCard) && r.Session != "" {
			t.Errorf("a record of the session without its card: %+v", r)
		}
		if r.Event == audit.EventProcessStarted && (r.Process == nil || r.Process.PID == 0 || r.Process.Parent == 0 || r.Process.Exe == "") {
			t.Errorf("who it was: %+v", r)
		}
	}
}

// checkSchema fails the test unless every line of every log of the box is right by the published schema.
func checkSchema(t *testing.T, box *testenv.Box) {
	t.Helper()
	schema, err := jsonschema.NewCompiler().Compile("../../deploy/schema/audit-v1.json")
	if err != nil {
		t.Fatal(err)
	}
	logs, err := filepath.Glob(filepath.Join(box.Inst.AuditDir(), "*", "*.jsonl"))
	if err != nil || len(logs) < 5 {
		t.Fatalf("the logs: %q, %v", logs, err)
	}
	for _, log := range logs {
		raw, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(raw)) {
			if !strings.HasSuffix(line, "\n") {
				continue // it is being written
			}
			doc, err := jsonschema.UnmarshalJSON(strings.NewReader(line))
			if err == nil {
				err = schema.Validate(doc)
			}
			if err != nil {
				t.Errorf("%s: %s: %v", log, line, err)
			}
		}
	}
}

func hexSum(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// checkCounts fails the test unless the records of started programs stand for as many as the kernel counted.
func checkCounts(t *testing.T, records []audit.Record) (started uint64) {
	t.Helper()
	said := ""
	for _, r := range records {
		switch r.Event {
		case audit.EventProcessStarted:
			started += max(r.Count, 1)
		case audit.EventProcessCounts:
			said = r.Fields["started"]
		}
	}
	if said != strconv.FormatUint(started, 10) {
		t.Errorf("the records stand for %d programs, and the kernel counted %q", started, said)
	}
	return started
}

// checkManifest fails the test unless the manifest is the one that the kid's last record names, and has these files.
func checkManifest(t *testing.T, records []audit.Record, want map[string]string) {
	t.Helper()
	text, sum := "", ""
	for _, r := range records {
		switch r.Event {
		case audit.EventFileManifest:
			text += r.Fields["entries"]
		case audit.EventKidDestroyed:
			sum = r.Fields["manifest_sha256"]
		}
	}
	if hexSum(text) != sum {
		t.Errorf("the kid's last record names %q, the manifest is %s:\n%s", sum, hexSum(text), text)
	}
	for head, name := range want {
		if !slices.Contains(strings.Split(text, "\n"), head+" "+name) {
			t.Errorf("%s %s is not in\n%s", head, name, text)
		}
	}
}

// TestProgramsThatNobodySees is the control: without the program in the kernel none is recorded, and a gap says so. With it
// back they are.
func TestProgramsThatNobodySees(t *testing.T) {
	t.Parallel()
	box := testenv.Start(t)
	kid := box.Spawn(bareCard, nil).Name
	ran := func(word string) func(r *audit.Record) bool {
		return func(r *audit.Record) bool {
			return r.Kid == kid && r.Event == audit.EventProcessStarted && strings.Contains(r.Fields["arguments"], word)
		}
	}
	if err := os.Remove(filepath.Join(box.Inst.PinDir(), "link_exec")); err != nil {
		t.Fatal(err)
	}
	box.WaitRecord("the gap", func(r *audit.Record) bool {
		return r.Event == audit.EventGap && r.Daemon == instance.Sandboxd && r.Fields[audit.FieldBlind] != "" && r.Outcome == audit.OutcomeFail
	})
	n := 0
	box.Until(soon, "a program that nobody sees", func() error { // the kernel lets go of it a little later
		n++
		before := len(box.Records(ran("")))
		box.Exec(kid, "/bin/echo", fmt.Sprint("unseen-", n))
		box.Exec(kid, "/bin/echo", fmt.Sprint("unseen-", n, "-too"))
		if len(box.Records(ran(""))) > before {
			return errors.New("it is recorded")
		}
		return nil
	})
	box.Must("setup", "--config", box.Inst.BoxConfig())
	box.WaitRecord("that they are seen again", func(r *audit.Record) bool {
		return r.Event == audit.EventGap && r.Daemon == instance.Sandboxd && r.Outcome == audit.OutcomeOK
	})
	box.Exec(kid, "/bin/echo", "seen")
	box.WaitRecord("a program", ran("/bin/echo seen"))
}

// TestStormsInAKidAreCounted attacks the recorders from inside a kid: many programs and many files at once, with another
// kid beside it. What is not in a record of its own is counted exactly, or a gap says that it is not.
func TestStormsInAKidAreCounted(t *testing.T) {
	t.Parallel()
	box := testenv.Start(t)
	noisy, quiet := box.Spawn(bareCard, nil).Name, box.Spawn(strings.Replace(bareCard, "name: bare", "name: quiet", 1), nil).Name
	const files, programs = 100_000, 600
	storm := fmt.Sprintf(`import os
for i in range(%d): os.mknod("/tmp/%%d" %% (i %% 500)); os.unlink("/tmp/%%d" %% (i %% 500))
for i in range(%d):
    if os.spawnv(os.P_WAIT, "/bin/true", ["true", str(i)]): raise SystemExit(1)
`, files/2, programs)
	if out := box.Exec(noisy, "/usr/bin/python3", "-c", storm); out.Exit.Code != 0 {
		t.Fatalf("the storm: %+v", out)
	}
	box.Exec(quiet, "/bin/touch", "/tmp/one")
	box.WaitRecord("the quiet kid's file", func(r *audit.Record) bool { return r.Kid == quiet && r.Fields["path"] == "/tmp/one" })
	endOf(box, noisy)
	endOf(box, quiet)
	records := box.Records(func(r *audit.Record) bool { return r.Kid == noisy })
	if n := checkCounts(t, records); n < programs {
		t.Errorf("%d programs are recorded", n)
	}
	created, gap, lines := uint64(0), false, 0
	for _, r := range records {
		switch r.Event {
		case audit.EventFileCreated:
			created += max(r.Count, 1)
			lines++
		case audit.EventGap:
			gap = true
		}
	}
	// Several on one name that nobody has read yet come as one.
	if created == 0 || created > files/2 || lines > files/10 {
		t.Errorf("%d files were created by %d records, a gap %v", created, lines, gap)
	}
	quietly := box.Records(func(r *audit.Record) bool { return r.Kid == quiet })
	inOrder(t, quietly, []string{"ran /bin/touch /tmp/one", "created /tmp/one", audit.EventKidDestroyed})
	for _, r := range quietly {
		if r.Event == audit.EventGap {
			t.Errorf("the quiet kid has a gap: %+v", r)
		}
	}
}

// TestARestartLeavesNoSilentHole: programs that a kid starts while sandboxd is away wait in the kernel; what it does to its
// files meanwhile is in the manifest, and a gap says when. That is no missing record: a rule on those does not trip.
func TestARestartLeavesNoSilentHole(t *testing.T) {
	t.Parallel()
	box := testenv.Start(t)
	kid := box.Spawn(strings.Replace(bareCard, "maxTime: 60s}", "maxTime: 60s, trip: [{on: auditGap}]}", 1), nil).Name
	of := func(r *audit.Record) bool { return r.Kid == kid }
	arguments := func(word string) func(*audit.Record) bool {
		return func(r *audit.Record) bool {
			return of(r) && r.Event == audit.EventProcessStarted && strings.Contains(r.Fields["arguments"], word)
		}
	}
	box.Must("exec", "-d", kid, "--", "sh", "-c", "n=0; while :; do n=$((n+1)); /bin/echo turn-$n >/workspace/$n; /bin/sleep 0.05; done")
	box.WaitRecord("the first turns", arguments("turn-3"))
	box.Kill9(instance.Sandboxd)
	box.WaitRecord("the gap", func(r *audit.Record) bool {
		return of(r) && r.Event == audit.EventGap && r.Fields[audit.FieldLost] == "file" && r.Fields[audit.FieldCounted] == "manifest"
	})
	box.WaitHealthy(instance.Sandboxd)
	box.Exec(kid, "/bin/echo", "afterwards")
	box.WaitRecord("a program after the restart", arguments("afterwards"))
	box.WaitRecord("more turns", arguments("turn-12"))
	livesOn(box, kid)
	endOf(box, kid)
	records := box.Records(of)
	turns, missing := 0, 0
	for n := 1; ; n++ {
		if !slices.ContainsFunc(records, func(r audit.Record) bool {
			return arguments(fmt.Sprintf("/bin/echo turn-%d", n))(&r) && strings.HasSuffix(r.Fields["arguments"], fmt.Sprintf("turn-%d", n))
		}) {
			if missing++; missing > 20 {
				break
			}
			continue
		}
		turns, missing = n, 0
	}
	said, folded := 0, uint64(0)
	for _, r := range records {
		switch r.Event {
		case audit.EventProcessStarted:
			folded += max(r.Count, 1)
		case audit.EventProcessCounts:
			said, _ = strconv.Atoi(r.Fields["started"]) // 0 is told below
		}
	}
	// What was read and not yet written when it was killed is missing, and the kernel's sum says how much.
	if turns < 10 || uint64(said) < folded || uint64(said) > folded+20 {
		t.Errorf("%d turns, %d programs recorded, %d counted", turns, folded, said)
	}
	text := ""
	for _, r := range records {
		if r.Event == audit.EventFileManifest {
			text += r.Fields["entries"]
		}
	}
	for n := 1; n < turns; n++ { // the last may not have written anything yet
		if !strings.Contains(text, fmt.Sprintf(" /workspace/%d\n", n)) {
			t.Errorf("the file of turn %d is not in the manifest", n)
		}
	}
	checkManifest(t, records, nil)
}
