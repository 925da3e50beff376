package e2e

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// TestATagSurvivesAReboot: all that a reboot takes goes (processes, cgroups, links, rules, programs, maps and the
// directory in memory), and what is on disk stays. Each tag hangs again, what it forbids is refused with its text,
// nothing that it stopped comes back, and it can be released.
func TestATagSurvivesAReboot(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := sleeper(t, box, bareCard)
	one := box.Stop(wire.StopRequest{Scope: wire.Scope{Kid: kid.Name}, Reason: "before the reboot", By: "Ada Operator"})
	all := box.Stop(wire.StopRequest{Scope: wire.Scope{All: true}, Reason: "before the reboot", By: "Ada Operator"})
	reboot(t, box)

	hanging := tags(t, box)
	for _, stop := range []string{all.Stop, one.Stop} {
		if !slices.ContainsFunc(hanging, func(tag wire.Tag) bool { return tag.Stop == stop && tag.Reason == "before the reboot" }) {
			t.Errorf("tag %s is gone: %+v", stop, hanging)
		}
	}
	_, err := box.TrySpawn("", bareCard, nil)
	if control.Status(err) != http.StatusLocked || !strings.Contains(err.Error(), all.Stop) || !strings.Contains(err.Error(), "before the reboot") {
		t.Errorf("spawning under a tag: %v, want its text", err)
	}
	if kids := kidsOf(t, box); len(kids) > 0 {
		t.Errorf("after the reboot there are %+v", kids)
	}
	box.Release(all.Stop)
	if _, err := box.TrySpawn(kid.Name, bareCard, nil); control.Status(err) != http.StatusLocked || !strings.Contains(err.Error(), one.Stop) {
		t.Errorf("spawning under the other tag: %v", err)
	}
	if again := box.Spawn(bareCard, nil); again.Session == kid.Session {
		t.Error("the session of before")
	}
}

// reboot takes from the box what a reboot takes, and starts it as its service would. The practice internet stays.
func reboot(t *testing.T, box *testenv.Box) {
	t.Helper()
	ca := filepath.Join(box.Inst.RunDir(), "practice", "ca.pem")
	roots, err := os.ReadFile(ca)
	if err != nil {
		t.Fatal(err)
	}
	box.StopSupervisor(unix.SIGKILL)
	for _, d := range append([]string{instance.Killswitchd}, others...) {
		box.Kill9(d)
	}
	box.Must("cleanup") // kids, links, rules, pins: what is not on disk
	if err := os.RemoveAll(box.Inst.RunDir()); err != nil {
		t.Fatal(err)
	}
	box.Must("setup", "--config", box.Inst.BoxConfig())
	if err := errors.Join(os.MkdirAll(filepath.Dir(ca), 0o755), os.WriteFile(ca, roots, 0o644)); err != nil { // the proxy reads it
		t.Fatal(err)
	}
	box.Up()
}
