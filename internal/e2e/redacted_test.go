package e2e

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/testenv"
)

// inLogs says in which of the box's audit logs a text is.
func inLogs(t *testing.T, box *testenv.Box, text string) (files []string) {
	t.Helper()
	err := filepath.WalkDir(box.Inst.AuditDir(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		raw, err := os.ReadFile(path)
		if bytes.Contains(raw, []byte(text)) {
			files = append(files, path)
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return files
}

// TestOthersRecordsLeaveOutWhatOnlyCreddKnows: a value of the vault, and what looks like a key, are in no record of any
// daemon, in whatever encoding they come there. A value that no vault has is: the control.
func TestOthersRecordsLeaveOutWhatOnlyCreddKnows(t *testing.T) {
	t.Parallel()
	const known, unknown = "plum-orchard-by-the-canal", "pear-orchard-by-the-canal"
	turned := []byte("iQo5UeA1fGs6JdH3cYn8BtR4vWm2LpZ9qK7x_phg") // this test's own file is put into kids, as no whole key may be
	slices.Reverse(turned)
	key := string(turned)
	box := testenv.Start(t)
	box.SetSecret("orchard", known, "files.vendor.test:80")
	kid := box.Spawn(callingCard, nil).Name
	for _, value := range []string{known, unknown} {
		encoded := base64.StdEncoding.EncodeToString([]byte("joe:" + value))
		box.Exec(kid, "/bin/echo", value, encoded)
		// Put together in the kid: a command with a whole key in it is refused.
		box.Exec(kid, "/bin/bash", "-c", fmt.Sprintf("a=%s; b=%s; /bin/echo deploy $a$b; touch /tmp/$a$b", key[:10], key[10:]))
		box.Exec(kid, "/bin/touch", "/tmp/"+value)
		box.Exec(kid, "/usr/bin/getent", "hosts", value+".test")
		box.Exec(kid, "/bin/bash", "-c", "exec 3<>/dev/tcp/files.vendor.test/80; printf 'GET /"+value+" HTTP/1.1\\r\\nHost: files.vendor.test\\r\\nConnection: close\\r\\n\\r\\n' >&3; cat <&3")
	}
	of := func(event string) func(r *audit.Record) bool {
		return func(r *audit.Record) bool { return r.Kid == kid && r.Event == event }
	}
	for _, event := range []string{audit.EventFileCreated, audit.EventLookup, audit.EventRequest, audit.EventProcessStarted} {
		box.WaitRecord(event, of(event))
	}
	endOf(box, kid)
	encoded := func(value string) string { return base64.StdEncoding.EncodeToString([]byte("joe:" + value))[6:36] }
	for _, text := range []string{known, encoded(known), key} {
		if files := inLogs(t, box, text); len(files) > 0 {
			t.Errorf("%q is in %q", text, files)
		}
	}
	for _, text := range []string{unknown, encoded(unknown)} {
		if files := inLogs(t, box, text); len(files) == 0 {
			t.Errorf("%q is in no log: the test shows nothing", text)
		}
	}
	if files := inLogs(t, box, unknown); len(files) < 3 {
		t.Errorf("a name that nobody knows is in %q only", files)
	}
}
