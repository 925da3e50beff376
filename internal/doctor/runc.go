package doctor

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
)

func runcProbes() []probe {
	return []probe{
		{Check{
			Name: "runc", Needed: true, Cost: "no kid can be started safely",
			Fix: "`apt-get install runc`, or runc 1.1.12 or newer from its release page",
		}, probeRunc},
		{Check{
			Name: "runc-2025", Cost: "an image that was made for it could redirect what runc writes while it makes a kid: import images that you trust",
			Fix: "upgrade to runc 1.2.8, 1.3.3 or newer, or to a distribution build whose changelog names CVE-2025-31133",
		}, probeRunc2025},
	}
}

// trialProbes run a kid: a runtime that is there may still be unable to run here.
func (p Probes) trialProbes() []probe {
	c := Check{Name: "kid-trial", Needed: true, Cost: "no kid can be started", Fix: "see what the runtime says; runc from the distribution runs on every machine that has the rest of this list"}
	if p.Trial == nil {
		c.Needed, c.Cost, c.Fix = false, "nobody knows whether a kid can be started", "install kid-init beside tagout"
		return []probe{{c, func(context.Context) (string, error) {
			return "", errors.New("no container was tried: there is no kid-init")
		}}}
	}
	return []probe{{c, p.Trial}}
}

// runcBuild is what `runc --version` says of itself.
type runcBuild struct {
	text   string // the version as printed
	v      version
	commit string // distributions put their package version here

	changelog string // of the distribution's package; may be empty, or another build's
}

func parseRunc(out string) (runcBuild, error) {
	var b runcBuild
	for line := range strings.Lines(out) {
		if v, ok := strings.CutPrefix(line, "runc version "); ok {
			b.text = strings.TrimSpace(v)
		}
		if v, ok := strings.CutPrefix(line, "commit: "); ok {
			b.commit = strings.TrimSpace(v)
		}
	}
	if b.text == "" {
		return b, errors.New("`runc --version` names no version")
	}
	var err error
	b.v, err = parseVersion(b.text)
	return b, err
}

func findRunc(ctx context.Context) (runcBuild, error) {
	out, err := exec.CommandContext(ctx, "runc", "--version").Output()
	if err != nil {
		return runcBuild{}, fmt.Errorf("asking runc for its version: %w", err)
	}
	b, err := parseRunc(string(out))
	b.changelog = changelog()
	return b, err
}

func probeRunc(ctx context.Context) (string, error) {
	b, err := findRunc(ctx)
	if err != nil {
		return "", err
	}
	return b.judge2024()
}

// patched2024 lists distribution builds older than 1.1.12 that carry the fix, by the beginning of their
// package version (Debian DSA-5615-1, Ubuntu USN-6619-1).
var patched2024 = []string{
	"1.1.5+ds1-1+deb12u", "1.0.0~rc93+ds1-5+deb11u3", "1.0.0~rc93+ds1-5+deb11u4", "1.0.0~rc93+ds1-5+deb11u5",
	"1.1.7-0ubuntu1~20.04.2", "1.1.7-0ubuntu1~22.04.2", "1.1.7-0ubuntu2.2",
}

// fixed says how a distribution's build is known to have the fix of cve, which upstream made later; "" where it is
// not: it is one of the builds in known, or the changelog that came with this very build names the hole.
func (b runcBuild) fixed(cve string, known []string) string {
	for _, p := range known {
		if strings.HasPrefix(b.commit, p) {
			return "this distribution build has the fix of " + cve
		}
	}
	if b.commit == "" || b.changelog == "" {
		return ""
	}
	first, _, _ := strings.Cut(b.changelog, "\n")
	if strings.Contains(first, "("+b.commit+")") && strings.Contains(b.changelog, cve) {
		return "the changelog of this distribution build names " + cve
	}
	return ""
}

// changelog reads what Debian's and Ubuntu's package says that it fixed; "" where there is none.
func changelog() string {
	f, err := os.Open("/usr/share/doc/runc/changelog.Debian.gz")
	if err != nil {
		return ""
	}
	defer f.Close() // only read
	z, err := gzip.NewReader(f)
	if err != nil {
		return ""
	}
	text, err := io.ReadAll(io.LimitReader(z, 1<<20))
	if err != nil {
		return ""
	}
	return string(text)
}

// judge2024 refuses versions that let a container reach the host through a leaked file descriptor
// (CVE-2024-21626, fixed in 1.1.12).
func (b runcBuild) judge2024() (string, error) {
	if !b.v.less(version{1, 1, 12}) {
		return "runc " + b.text, nil
	}
	if why := b.fixed("CVE-2024-21626", patched2024); why != "" {
		return fmt.Sprintf("runc %s, as %s: older than 1.1.12, but %s", b.text, b.commit, why), nil
	}
	return "", fmt.Errorf("runc %s is open to CVE-2024-21626: a container can reach the host's files", b.text)
}

func probeRunc2025(ctx context.Context) (string, error) {
	b, err := findRunc(ctx)
	if err != nil {
		return "", err
	}
	return b.judge2025()
}

// judge2025 looks for the fixes of November 2025 (CVE-2025-31133, -52565, -52881: masked paths and mounts
// that an image can redirect), which are in 1.2.8, 1.3.3 and 1.4.
func (b runcBuild) judge2025() (string, error) {
	fixed := map[int]int{2: 8, 3: 3}
	patch, known := fixed[b.v[1]]
	switch {
	case b.v[0] > 1, b.v[0] == 1 && b.v[1] >= 4, known && b.v[2] >= patch:
		return "runc " + b.text, nil
	}
	missing := slices.DeleteFunc([]string{"CVE-2025-31133", "CVE-2025-52565", "CVE-2025-52881"}, func(cve string) bool { return b.fixed(cve, nil) != "" })
	if len(missing) == 0 {
		return fmt.Sprintf("runc %s, as %s: the distribution's changelog names the fixes", b.text, b.commit), nil
	}
	return "", fmt.Errorf("runc %s is older than the fixes of CVE-2025-31133, -52565 and -52881, unless its distribution put them in", b.text)
}
