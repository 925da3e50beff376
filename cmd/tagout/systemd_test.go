package main

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coreos/go-systemd/v22/unit"

	"tagout/internal/instance"
)

const unitFile = "../../deploy/systemd/tagout@.service"

// readUnit returns the unit's options by section and name.
func readUnit(t *testing.T) map[string][]string {
	t.Helper()
	f, err := os.Open(unitFile)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() // only read
	options, err := unit.DeserializeOptions(f)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]string{}
	for _, o := range options {
		key := o.Section + "." + o.Name
		out[key] = append(out[key], o.Value)
	}
	return out
}

// TestTheUnitRunsCommandsThatThereAre: each command line parses as `tagout` itself parses it.
func TestTheUnitRunsCommandsThatThereAre(t *testing.T) {
	have := readUnit(t)
	for key, want := range map[string]string{"Service.ExecStartPre": "setup", "Service.ExecStart": "up"} {
		for _, line := range have[key] {
			words := strings.Fields(strings.ReplaceAll(line, "%i", "prod"))
			a := &app{in: strings.NewReader(""), out: io.Discard, err: io.Discard}
			cmd, rest, err := a.root().Find(words[1:])
			if err == nil {
				err = cmd.ParseFlags(rest)
			}
			if err != nil || cmd.Name() != want || a.instance != "prod" || len(cmd.Flags().Args()) > 0 || filepath.Base(words[0]) != "tagout" {
				t.Errorf("%s=%s: command %s, instance %s, %v", key, line, cmd.Name(), a.instance, err)
			}
		}
		if len(have[key]) != 1 {
			t.Errorf("%s: %v", key, have[key])
		}
	}
}

// TestTheUnitKeepsTheBoxUp compares what the kill switch counts on with what the unit says.
func TestTheUnitKeepsTheBoxUp(t *testing.T) {
	have := readUnit(t)
	for key, want := range map[string]string{
		"Service.Type": "notify", "Service.NotifyAccess": "main", "Service.Restart": "always", "Service.OOMScoreAdjust": "-900",
		"Service.LoadCredentialEncrypted": instance.UnlockCredential + ":tagout-%i", // relative: one that is absent stops nothing
		"Service.KillMode":                "mixed", "Service.NoNewPrivileges": "yes", "Service.LimitMEMLOCK": "infinity", "Unit.StartLimitIntervalSec": "0",
	} {
		if got := strings.Join(have[key], ","); got != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
	for key, most := range map[string]time.Duration{"Service.WatchdogSec": 30 * time.Second, "Service.RestartSec": time.Second} {
		if d, err := time.ParseDuration(strings.Join(have[key], ",")); err != nil || d <= 0 || d > most {
			t.Errorf("%s is %v, %v, want at most %v", key, have[key], err, most)
		}
	}
	// Each of these gives the unit mounts of its own, in which the kids' mounts would get lost.
	for key := range have {
		name := strings.TrimPrefix(key, "Service.")
		for _, bad := range []string{"ProtectSystem", "ProtectHome", "ProtectKernel", "ProtectControlGroups", "ProtectProc", "Private", "ReadWritePaths", "ReadOnlyPaths", "InaccessiblePaths", "BindPaths", "TemporaryFileSystem", "RootDirectory", "MountFlags", "StateDirectory", "RuntimeDirectory"} {
			if strings.HasPrefix(name, bad) {
				t.Errorf("%s gives the unit a mount namespace", name)
			}
		}
	}
}

// TestSystemdAcceptsTheUnit asks systemd itself, where it is installed. It wants the program to be there.
func TestSystemdAcceptsTheUnit(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Log("systemd is not installed: what the other tests read is all that is checked")
		return
	}
	raw, err := os.ReadFile(unitFile)
	if err != nil {
		t.Fatal(err)
	}
	check := func(text string) (string, error) {
		file := filepath.Join(t.TempDir(), "tagout@prod.service")
		if err := os.WriteFile(file, []byte(strings.ReplaceAll(text, "/usr/bin/tagout", "/bin/true")), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command(analyze, "verify", "--man=no", file).CombinedOutput()
		return string(out), err
	}
	if out, err := check(string(raw)); err != nil || strings.Contains(out, "tagout@prod") {
		t.Errorf("systemd-analyze verify: %v: %s", err, out)
	}
	if out, err := check(strings.Replace(string(raw), "Restart=always", "Restart=sometimes", 1)); err == nil && !strings.Contains(out, "sometimes") {
		t.Error("it accepts a broken unit too: the check above shows nothing")
	}
}

// TestTheUnitsCredentialIsFound where systemd says that it is, and nothing else is taken for it.
func TestTheUnitsCredentialIsFound(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("CREDENTIALS_DIRECTORY", dir)
	if got := systemdCredential(instance.UnlockCredential); got != "" {
		t.Errorf("one that is not there: %q", got)
	}
	file := filepath.Join(dir, instance.UnlockCredential)
	if err := os.WriteFile(file, []byte("x"), 0o400); err != nil {
		t.Fatal(err)
	}
	if got := systemdCredential(instance.UnlockCredential); got != file {
		t.Errorf("found %q", got)
	}
	t.Setenv("CREDENTIALS_DIRECTORY", "")
	if got := systemdCredential(instance.UnlockCredential); got != "" {
		t.Errorf("without systemd: %q", got)
	}
}
