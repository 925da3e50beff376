package killswitch

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// allowed is all that this package may pull in, beyond the standard library, directly or not. Whoever adds to
// it makes the watchdog bigger: it has to start, and fit into locked memory, when everything else is broken.
var allowed = []string{
	"github.com/oklog/ulid/v2",
	"golang.org/x/mod/sumdb/note", // of internal/authority; it needs the standard library alone
	"golang.org/x/net/idna",       // of internal/policy, through the session document
	"golang.org/x/sys/unix",
	"golang.org/x/text/secure/bidirule",
	"golang.org/x/text/transform",
	"golang.org/x/text/unicode/bidi",
	"golang.org/x/text/unicode/norm",
	"tagout/internal/audit",
	"tagout/internal/authority",
	"tagout/internal/bootclock",
	"tagout/internal/cgroup",
	"tagout/internal/control",
	"tagout/internal/logtail",
	"tagout/internal/policy",
	"tagout/internal/reason",
	"tagout/internal/session",
	"tagout/internal/trip",
	"tagout/internal/wire",
	"tagout/killswitch",
}

func TestImports(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".").Output()
	if err != nil {
		t.Fatalf("listing imports: %v", err)
	}
	for _, path := range strings.Fields(string(out)) {
		if !slices.Contains(allowed, path) {
			t.Errorf("%s is not on the list", path)
		}
	}
}
