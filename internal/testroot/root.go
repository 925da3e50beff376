// Package testroot gates tests that need root. It imports nothing of Tagout, so that any test may use it.
package testroot

import (
	"os"
	"testing"
)

// Require ends the test unless it runs as root: it skips with a reason on a developer's own account, and
// fails where TAGOUT_ROOT_TESTS=1 says that privileged tests must run.
func Require(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("TAGOUT_ROOT_TESTS") == "1" {
		t.Fatal("TAGOUT_ROOT_TESTS=1 but the tests do not run as root: run them with sudo")
	}
	t.Skip("needs root: run `sudo make test`")
}
