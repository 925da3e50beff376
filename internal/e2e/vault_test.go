package e2e

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// TestASessionsEndSaysWhatItWasGrantedForNothing: in the record, in what destroy and run print, and in the lesson.
func TestASessionsEndSaysWhatItWasGrantedForNothing(t *testing.T) {
	t.Parallel()
	box := testenv.Start(t)
	put := func(name string, args ...string) {
		t.Helper()
		if r := box.TagoutIn(strings.NewReader(box.Net.Secret()+"\n"), append([]string{"vault", "set", name}, args...)...); r.Code != 0 {
			t.Fatalf("setting %s: %s", name, r.Stderr)
		}
	}
	put(secret, "--host", "api.vendor.test", "--port", "443", "--host", "spare.vendor.test:443", "--as", "bearer", "--method", "GET", "--method", "DELETE", "--path", "/v1/*", "--path", "/v2/*")
	put("idle_key", "--host", "api.vendor.test:443")
	text := strings.Replace(card, "  scope:\n", "  scope:\n    - {secret: idle_key, env: IDLE_KEY}\n", 1)
	// It shows the token as a bearer's, in a GET of /v1/whoami, and never the other one.
	const whoami = "/workspace/hostile whoami https://api.vendor.test/v1/whoami"

	kid := box.Spawn(text, hostile(t, box))
	if out := box.Sh(kid.Name, whoami); !strings.Contains(out.Stdout, "accepted=true") {
		t.Fatalf("the API did not accept the secret: %q %q", out.Stdout, out.Stderr)
	}
	out := box.Must("destroy", kid.Name, "--reason", "done", "--lesson", "what was granted")
	wants := []string{"granted and never used: idle_key", "wider than its use: vendor_api", "spare.vendor.test:443", "method DELETE", "path /v2/*"}
	for _, want := range wants {
		if !strings.Contains(out, want) {
			t.Errorf("destroy does not say %q: %s", want, out)
		}
	}
	rec := box.WaitRecord("the report", func(r *audit.Record) bool { return r.Event == audit.EventTokenJudged && r.Kid == kid.Name })
	if rec.Fields["granted"] != "idle_key,vendor_api" || rec.Fields["unused"] != "idle_key" || !strings.Contains(rec.Fields["wide"], "path /v2/* never used") {
		t.Errorf("the record: %+v", rec)
	}
	var notes []wire.Lesson
	if err := json.Unmarshal([]byte(box.Must("--json", "lessons", "granted")), &notes); err != nil || len(notes) != 1 {
		t.Fatalf("lessons: %v, %v", notes, err)
	}
	shown := box.Must("lessons", "show", notes[0].Name)
	for _, want := range wants {
		if !strings.Contains(shown, want) {
			t.Errorf("the lesson does not say %q: %s", want, shown)
		}
	}

	dir := t.TempDir()
	agent := hostile(t, box)["hostile"]
	if err := os.WriteFile(filepath.Join(dir, "hostile"), agent, 0o755); err != nil { // a program
		t.Fatal(err)
	}
	file := filepath.Join(dir, "card.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	ran := box.Tagout("run", file, "--", "/bin/true")
	if ran.Code != 0 || !strings.Contains(ran.Stderr, "granted and never used: idle_key, vendor_api") || strings.Contains(ran.Stdout, "granted") {
		t.Errorf("run ended with %+v", ran)
	}
	needy := box.Spawn(bareCard, nil) // the control: who was granted nothing is told nothing
	if out := box.Must("destroy", needy.Name, "--reason", "done"); strings.Contains(out, "granted") || strings.Contains(out, "wider") {
		t.Errorf("destroying a kid without secrets says %s", out)
	}
}

// TestASealedVaultDeniesUntilSomebodyOpensIt, with the real daemons: values and passphrases go in by standard input alone, are
// in no process's arguments or environment meanwhile, and credd, once killed, gives nothing until it is unlocked.
func TestASealedVaultDeniesUntilSomebodyOpensIt(t *testing.T) {
	t.Parallel()
	box := testenv.Start(t)
	const passphrase, first = "seven lamps in the harbour", "first-value-0123456789"
	scan := watchProcesses(t, passphrase, first, box.Net.Secret())
	in := func(text string, args ...string) testenv.Result {
		return box.TagoutIn(strings.NewReader(text+"\n"), args...)
	}
	for _, step := range []testenv.Result{
		in(first, "vault", "set", secret, "--host", "api.vendor.test:443"),
		in(box.Net.Secret(), "vault", "rotate", secret),
		in(passphrase, "vault", "seal", "--passphrase-file", "-"),
	} {
		if step.Code != 0 {
			t.Fatalf("%+v", step)
		}
	}
	if out := box.Must("vault", "ls"); !strings.Contains(out, "any header field") || strings.Contains(out, first) {
		t.Errorf("vault ls: %s", out)
	}
	if out := box.Must("vault", "export-recipients"); !strings.HasPrefix(out, "age1") {
		t.Errorf("recipients: %s", out)
	}
	box.Kill9(instance.Credd)
	box.WaitHealthy(instance.Credd)
	box.Until(10*time.Second, "credd says that its vault is sealed", func() error {
		if out := box.Tagout("status"); !strings.Contains(out.Stdout, "the vault is sealed") {
			return errText(out.Stdout + out.Stderr)
		}
		return nil
	})
	if _, err := box.TrySpawn("", card, hostile(t, box)); err == nil || !strings.Contains(err.Error(), "tagout vault unlock") {
		t.Errorf("a spawn under a sealed vault: %v", err)
	}
	if r := in("seven lamps in the desert", "vault", "unlock"); r.Code != 3 || strings.Contains(r.Stderr, "desert") {
		t.Errorf("a wrong passphrase: %+v", r)
	}
	if r := in(passphrase, "vault", "unlock"); r.Code != 0 {
		t.Fatalf("the right one: %+v", r)
	}
	kid := box.Spawn(card, hostile(t, box))
	if out := box.Sh(kid.Name, "/workspace/hostile whoami https://api.vendor.test/v1/whoami"); !strings.Contains(out.Stdout, "accepted=true") {
		t.Errorf("after it was opened, the rotated value: %q %q", out.Stdout, out.Stderr)
	}
	if rec := box.WaitRecord("the rotation", func(r *audit.Record) bool {
		return r.Event == audit.EventVaultChanged && r.Fields["change"] == "rotated"
	}); rec.Fields["version_before"] != "1" || rec.Fields["version"] != "2" {
		t.Errorf("the rotation's record: %+v", rec)
	}
	sealToSystemd(t, box)
	if out := box.Sh(box.Spawn(card, hostile(t, box)).Name, "/workspace/hostile whoami https://api.vendor.test/v1/whoami"); !strings.Contains(out.Stdout, "accepted=true") {
		t.Errorf("with systemd's key: %q %q", out.Stdout, out.Stderr)
	}
	scan()
}

// sealToSystemd seals to a key that the real systemd-creds keeps, with a host key of the test's own, kills credd, and opens the
// vault with what systemd gives back.
func sealToSystemd(t *testing.T, box *testenv.Box) {
	t.Helper()
	dir := t.TempDir()
	credential, key := filepath.Join(dir, "tagout-test"), filepath.Join(dir, "key")
	run := func(name string, args ...string) {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Env = append(os.Environ(), "SYSTEMD_CREDENTIAL_SECRET="+filepath.Join(dir, "credential.secret"))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s %v: %v\n%s", name, args, err, out)
		}
	}
	run(box.Bin+"/tagout", "--instance", box.Inst.Name(), "vault", "seal", "--systemd", "--credential", credential, "--with-key", "host")
	box.Kill9(instance.Credd)
	box.WaitHealthy(instance.Credd)
	if r := box.Tagout("vault", "ls"); r.Code != 4 || !strings.Contains(r.Stderr, "sealed") {
		t.Errorf("vault ls of a sealed one: %+v", r)
	}
	run("systemd-creds", "decrypt", "--name="+instance.UnlockCredential, credential, key)
	box.Must("vault", "unlock", "--file", key)
}

type errText string

func (e errText) Error() string { return string(e) }

// watchProcesses looks at every process's arguments and environment, again and again, until the returned function is called;
// that one fails the test where a text was in one of them, or where not even a control's was found.
func watchProcesses(t *testing.T, texts ...string) func() {
	t.Helper()
	const control = "CONTROL_OF_THE_PROCESS_WATCH"
	found := map[string]string{}
	rounds := 0
	look := func() {
		rounds++
		files, _ := filepath.Glob("/proc/[0-9]*/[ce][mn][dv]*") // cmdline and environ
		for _, file := range files {
			raw, err := os.ReadFile(file)
			if err != nil {
				continue // it has ended
			}
			for _, text := range append(texts, control) {
				if bytes.Contains(raw, []byte(text)) {
					found[text] = file
				}
			}
		}
	}
	ending, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			look()
			select {
			case <-ending:
				return
			case <-tick.C:
			}
		}
	}()
	end := sync.OnceFunc(func() { close(ending); <-ended })
	t.Cleanup(end)
	return func() {
		t.Helper()
		end()
		for _, text := range texts {
			if where := found[text]; where != "" {
				t.Errorf("a value was in %s", where)
			}
		}
		withControl(t, control, look)
		if found[control] == "" || rounds < 3 {
			t.Errorf("the watch sees nothing: %d rounds", rounds)
		}
	}
}

// withControl calls look while a process has the text among its arguments.
func withControl(t *testing.T, text string, look func()) {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-c", "read line", text)
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	look()
	in.Close() // it reads its end
	cmd.Wait() // it fails to read, and that is all
}
