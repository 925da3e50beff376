package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/testenv"
	"tagout/internal/wire"
	"tagout/sandboxd/image/store"
)

const practiceMirror = "http://mirror.vendor.test/debian"

// buildArgs is the command line that builds an image out of the practice archive.
func buildArgs(m *mirror, name string, more ...string) []string {
	return append([]string{"image", "build", name, "--suite", suite, "--mirror", practiceMirror, "--keyring", m.keyring(), "--space", "256MiB"}, more...)
}

// wantNothingOfBuilds: no kid of a build lives, and there are these images and no leftovers.
func wantNothingOfBuilds(t *testing.T, box *testenv.Box, want string) {
	t.Helper()
	var kids []wire.Kid
	if err := json.Unmarshal([]byte(box.Must("list", "--json")), &kids); err != nil || len(kids) > 0 {
		t.Errorf("kids: %+v, %v", kids, err)
	}
	if got := images(t, box); got != want {
		t.Errorf("images: %s, want %s", got, want)
	}
}

func builtImage(t *testing.T, box *testenv.Box, name string) store.Image {
	t.Helper()
	var list []store.Image
	if err := json.Unmarshal([]byte(box.Must("image", "ls", "--json")), &list); err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(list, func(i store.Image) bool { return i.Name == name && i.Current })
	if i < 0 || list[i].Build == nil {
		t.Fatalf("no image %s that was built: %+v", name, list)
	}
	return list[i]
}

// TestImageBuild builds an image of packages with scripts of their own, runs a kid on it, and hears from doctor when the
// archive has newer packages.
func TestImageBuild(t *testing.T) {
	t.Parallel()
	box := testenv.Start(t)
	m := openMirror(t, box)
	m.put("practice-lib", deb{control: "Version: 2:1.5-1\nArchitecture: all\n", files: map[string]string{"usr/share/lib": "lib\n"}})
	m.put("practice-tool", deb{
		control: "Version: 1.0\nArchitecture: all\nDepends: practice-lib\n", files: map[string]string{"etc/tool.conf": "as packed\n"},
		scripts: map[string]string{
			"conffiles": "/etc/tool.conf\n",
			"postinst":  "#!/bin/sh\nset -e\ncat /usr/share/lib >/usr/share/tool\nid -u >>/usr/share/tool\nmkdir /var/tool && chown 1000:1000 /var/tool\n",
		},
	})
	out := box.Must(buildArgs(m, "tools", "--package", "practice-tool")...)
	if !strings.HasPrefix(out, "image tools: sha256:") {
		t.Errorf("build: %s", out)
	}
	wantNothingOfBuilds(t, box, "tools true 0, 0 leftovers")
	built := builtImage(t, box, "tools")
	want := []store.Package{{Name: "apt", Version: "1", Arch: "all"}, {Name: "practice-base", Version: "1", Arch: "all"}, {Name: "practice-lib", Version: "2:1.5-1", Arch: "all"}, {Name: "practice-tool", Version: "1.0", Arch: "all"}}
	if !slices.Equal(built.Build.Packages, want) || built.Source != practiceMirror+" "+suite || !slices.Equal(built.Build.Wanted, []string{"practice-tool"}) {
		t.Errorf("the manifest: %+v %+v", built.Manifest, built.Build)
	}
	box.WaitRecord("the image came", func(r *audit.Record) bool {
		return r.Event == audit.EventImageAdded && r.Actor == "uid:0" && r.Fields["way"] == "build" && r.Fields["digest"] == built.Digest && r.Fields["size"] == fmt.Sprint(built.Size)
	})
	kid := box.Spawn(imageCard("tools"), nil).Name
	if out := box.Sh(kid, "cat /usr/share/tool /etc/tool.conf; id -u; [ -O /var/tool ] && echo mine; dpkg-query -W; ls /var/cache/apt/archives/*.deb /usr/sbin/policy-rc.d"); out.Stdout !=
		"lib\n0\nas packed\n1000\nmine\napt\t1\npractice-base\t1\npractice-lib\t2:1.5-1\npractice-tool\t1.0\n" {
		t.Errorf("in a kid: %q %q", out.Stdout, out.Stderr)
	}
	if r := box.Tagout("doctor"); !strings.Contains(r.Stdout, "1 image, none older than its source\n") {
		t.Errorf("doctor: %s", r.Stdout)
	}
	m.put("practice-lib", deb{control: "Version: 2:1.6-1\nArchitecture: all\n", files: map[string]string{"usr/share/lib": "newer\n"}})
	if r := box.Tagout("doctor"); !strings.Contains(r.Stdout, "its mirrors have other packages by now: tools") {
		t.Errorf("doctor, when the archive has a newer package: %s", r.Stdout)
	}
	box.Must(buildArgs(m, "tools", "--package", "practice-tool")...)
	if v := builtImage(t, box, "tools").Build.Packages[2].Version; v != "2:1.6-1" {
		t.Errorf("built again, it has version %s", v)
	}
	if r := box.Tagout("doctor"); !strings.Contains(r.Stdout, "newer build of tools than "+kid) || strings.Contains(r.Stdout, "by now") {
		t.Errorf("doctor, after the second build: %s", r.Stdout)
	}
	box.Destroy(kid)
}

// grasp is a script of a package that tries to reach something; OUT gets a line for each attempt.
func grasp(box *testenv.Box, marker string) string {
	return `#!/bin/bash
try() { name=$1; shift; if "$@" >/dev/null 2>&1; then echo "$name: done"; else echo "$name: refused"; fi >>"${OUT:-/var/attempts}"; }
try "reach the mirror" bash -c 'exec 3<>/dev/tcp/` + box.Net.ShelfAddr().String() + `/80'
try "read a file of the machine" cat ` + marker + `
try "write to the machine" bash -c 'echo written >` + filepath.Dir(marker) + `/written'
try "mount" mount -t tmpfs tmpfs /mnt
try "make a device" mknod "${DEV:-/var}/device" b 7 200
try "make namespaces" unshare --mount true
`
}

// attempts counts how many of the script's attempts did what they were to.
func attempts(text string) (done, refused int) {
	return strings.Count(text, ": done\n"), strings.Count(text, ": refused\n")
}

// TestImageBuildHostile: what packages' scripts try reaches nothing. The same script, run on the machine, reaches all of it.
func TestImageBuildHostile(t *testing.T) {
	t.Parallel()
	box := testenv.Start(t)
	m := openMirror(t, box)
	dir := t.TempDir()
	marker := filepath.Join(dir, "marker")
	if err := os.WriteFile(marker, []byte("of the machine\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	script := grasp(box, marker)
	control := exec.Command("unshare", "--mount", "--propagation", "private", "bash")
	control.Stdin = strings.NewReader(script)
	control.Env = append(os.Environ(), "OUT="+filepath.Join(dir, "attempts"), "DEV="+dir)
	if out, err := control.CombinedOutput(); err != nil {
		t.Fatalf("the control: %v %s", err, out)
	}
	raw, err := os.ReadFile(filepath.Join(dir, "attempts"))
	if err != nil {
		t.Fatal(err)
	}
	all, refused := attempts(string(raw))
	if all != 6 || refused != 0 {
		t.Errorf("on the machine itself %d attempts are refused: the test shows less: %s", refused, raw)
	}
	if err := os.Remove(filepath.Join(dir, "written")); err != nil {
		t.Fatal(err)
	}
	m.put("hostile", deb{control: "Version: 1\nArchitecture: all\n", scripts: map[string]string{"preinst": script, "postinst": script},
		files: map[string]string{"usr/share/hostile": "x"}})
	box.Must(buildArgs(m, "hostile", "--package", "hostile")...)
	kid := box.Spawn(imageCard("hostile"), nil).Name
	tried := box.Sh(kid, "cat /var/attempts").Stdout
	if done, refused := attempts(tried); done != 0 || refused != 2*all {
		t.Errorf("in a build %d attempts were not refused and %d were: %s", done, refused, tried)
	}
	if _, err := os.Lstat(filepath.Join(dir, "written")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file was written on the machine: %v", err)
	}
	box.Destroy(kid)
	wantNothingOfBuilds(t, box, "hostile true 0, 0 leftovers")
}

// TestImageBuildFails: a build that cannot be finished says why, is on record, and leaves nothing; the image that had the
// name stays.
func TestImageBuildFails(t *testing.T) {
	t.Parallel()
	box := testenv.Start(t)
	m := openMirror(t, box)
	m.put("practice-tool", deb{control: "Version: 1.0\nArchitecture: all\n", files: map[string]string{"usr/share/tool": strings.Repeat("tool\n", 1000)}})
	m.put("breaks", deb{control: "Version: 1.0\nArchitecture: all\n", scripts: map[string]string{"postinst": "#!/bin/sh\necho it does not like it here; exit 3\n"}})
	m.put("large", deb{control: "Version: 1.0\nArchitecture: all\n", files: map[string]string{"usr/share/large": string(make([]byte, 64<<20))}})
	box.Must(buildArgs(m, "tools", "--package", "practice-tool")...) // the control: the archive is good
	first := builtImage(t, box, "tools").ID
	other := &mirror{t: t, dir: t.TempDir()}
	other.makeKey()
	notFound := func(path string, content []byte) []byte { return nil }
	bitFlipped := func(part string) func(string, []byte) []byte {
		return func(path string, content []byte) []byte {
			if !strings.Contains(path, part) {
				return content
			}
			out := slices.Clone(content)
			out[len(out)/2] ^= 1
			return out
		}
	}
	for name, c := range map[string]struct {
		args  []string
		spoil func(string, []byte) []byte
		code  reason.Code
		deny  bool
		said  string
	}{
		"a mirror that is gone":                {nil, notFound, reason.SourceFailed, false, "404"},
		"a package that is not what is listed": {nil, bitFlipped("practice-tool.deb"), reason.DigestMismatch, true, "Hash Sum mismatch"},
		"a list that is not what was signed":   {nil, bitFlipped("Packages"), reason.DigestMismatch, true, ""},
		"a list with a broken signature":       {nil, bitFlipped("InRelease"), reason.DigestMismatch, true, ""},
		"somebody else's signature":            {[]string{"--keyring", other.keyring()}, nil, reason.DigestMismatch, true, "NO_PUBKEY"},
		"a package that is not there":          {[]string{"--package", "nosuch"}, nil, reason.SourceFailed, false, "nosuch"},
		"a script that fails":                  {[]string{"--package", "breaks"}, nil, reason.SourceFailed, false, "it does not like it here"},
		"a name that does not resolve":         {[]string{"--mirror", "http://nosuch.vendor.test/debian"}, nil, reason.SourceFailed, false, "nosuch"},
		"too little space":                     {[]string{"--package", "large", "--space", "64MiB"}, nil, reason.Capacity, false, "--space"},
		"an image that is too large":           {[]string{"--max-bytes", "1000000"}, nil, reason.TooLarge, false, "limits"},
		"too little time":                      {[]string{"--timeout", "1s"}, nil, reason.SourceFailed, false, "longer than 1s"},
		"a suite that is an option":            {[]string{"--suite=--help"}, nil, reason.Malformed, false, "suite"},
		"a package that is an option":          {[]string{"--package=-o"}, nil, reason.Malformed, false, "package"},
		"a package to be removed":              {[]string{"--package=bash-"}, nil, reason.Malformed, false, "package"},
		"a source within a source":             {[]string{"--mirror", "http://mirror.vendor.test/x y"}, nil, reason.Malformed, false, "source"},
	} {
		m.set(c.spoil, nil)
		since := len(box.Records(func(r *audit.Record) bool { return r.Event == audit.EventImageRefused }))
		r := box.Tagout(append(buildArgs(m, "tools", "--package", "practice-tool"), c.args...)...)
		m.set(nil, nil)
		if r.Code == 0 || !strings.Contains(r.Stderr, c.said) {
			t.Errorf("%s: %+v, want %q", name, r, c.said)
		}
		var refused []audit.Record
		box.Until(soon, "there is a record of "+name, func() error {
			if refused = box.Records(func(r *audit.Record) bool { return r.Event == audit.EventImageRefused }); len(refused) != since+1 {
				return fmt.Errorf("%d records", len(refused)-since)
			}
			return nil
		})
		if last := refused[since]; last.Reason != c.code || (last.Outcome == audit.OutcomeDeny) != c.deny {
			t.Errorf("%s: recorded %s %s, want %s: %s", name, last.Outcome, last.Reason, c.code, last.Detail)
		}
		wantNothingOfBuilds(t, box, "tools true 0, 0 leftovers")
	}
	if now := builtImage(t, box, "tools").ID; now != first {
		t.Errorf("the image is %s, and was %s", now, first)
	}
	fullDisk(t, box, func() {
		if r := box.Tagout(buildArgs(m, "full")...); r.Code != 3 || !strings.Contains(r.Stderr, "no space left") {
			t.Errorf("on a full disk: %+v", r)
		}
		wantNothingOfBuilds(t, box, "0 leftovers")
	})
}

// fullDisk puts the image store on a disk that is too small for an image while do runs.
func fullDisk(t *testing.T, box *testenv.Box, do func()) {
	t.Helper()
	dir := box.Inst.ImageDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=4m"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("something still uses the store: %v", err)
		}
	}()
	for _, d := range []string{"names", "content", "tmp"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	do()
}

// TestImageBuildIsBrokenOff: whoever is killed or stopped in the middle of a build, nothing of it stays, and no half of it is
// ever seen.
func TestImageBuildIsBrokenOff(t *testing.T) {
	t.Parallel()
	box := testenv.Start(t)
	m := openMirror(t, box)
	m.put("waits", deb{control: "Version: 1.0\nArchitecture: all\n", scripts: map[string]string{"postinst": "#!/bin/sh\nsleep 600\n"}})
	ready := func(step string) func() error {
		return func() error {
			var kids []wire.Kid
			if err := box.Client(instance.Sandboxd).Call(t.Context(), "GET", "/v1/kids", nil, &kids); err != nil {
				return err
			}
			for _, k := range kids {
				if strings.HasSuffix(k.Purpose, ": "+step) && k.State == wire.KidRunning {
					return nil
				}
			}
			return fmt.Errorf("the kids are %+v", kids)
		}
	}
	for name, c := range map[string]struct {
		step string
		end  func(*exec.Cmd)
	}{
		"sandboxd is killed while packages are fetched":      {"fetch", func(*exec.Cmd) { box.Kill9(instance.Sandboxd) }},
		"sandboxd is killed while packages are installed":    {"finish", func(*exec.Cmd) { box.Kill9(instance.Sandboxd) }},
		"the command is killed while packages are fetched":   {"fetch", func(c *exec.Cmd) { c.Process.Kill() }},
		"the command is killed while packages are installed": {"finish", func(c *exec.Cmd) { c.Process.Kill() }},
		"the kid is destroyed while packages are fetched":    {"fetch", func(*exec.Cmd) { box.Destroy(onlyKid(t, box)) }},
		"the kid is destroyed while packages are installed":  {"finish", func(*exec.Cmd) { box.Destroy(onlyKid(t, box)) }},
	} {
		stalled := make(chan struct{})
		args := buildArgs(m, "half")
		if c.step == "fetch" {
			m.set(nil, stalled)
		} else {
			m.set(nil, nil)
			args = append(args, "--package", "waits")
		}
		cmd := exec.CommandContext(t.Context(), filepath.Join(box.Bin, "tagout"), append([]string{"--instance", box.Inst.Name()}, args...)...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		box.Until(4*soon, name, ready(c.step))
		if got := images(t, box); !strings.HasPrefix(got, "1 leftovers") {
			t.Errorf("%s: while it is built there are the images %s", name, got)
		}
		if r := box.Tagout(buildArgs(m, "half")...); r.Code != 3 || !strings.Contains(r.Stderr, "under this name already") {
			t.Errorf("%s: a second build of the name: %+v", name, r)
		}
		if swept := box.Must("image", "gc"); !strings.Contains(swept, "0 leftovers") {
			t.Errorf("%s: what is under way was swept: %s", name, swept)
		}
		c.end(cmd)
		if err := cmd.Wait(); err == nil {
			t.Errorf("%s: the command ended well", name)
		}
		box.WaitHealthy(instance.Sandboxd)
		box.Until(4*soon, "nothing is left after "+name, func() error {
			var kids []wire.Kid
			if err := json.Unmarshal([]byte(box.Must("list", "--json")), &kids); err != nil || len(kids) > 0 {
				return fmt.Errorf("kids %+v, %v", kids, err)
			}
			if got := images(t, box); got != "0 leftovers" {
				return errors.New(got)
			}
			return nil
		})
	}
	m.set(nil, nil)
	box.Must(buildArgs(m, "half")...) // the control: nothing holds it up now
	wantNothingOfBuilds(t, box, "half true 0, 0 leftovers")
}

// onlyKid is the name of the only kid that there is.
func onlyKid(t *testing.T, box *testenv.Box) string {
	t.Helper()
	var kids []wire.Kid
	if err := json.Unmarshal([]byte(box.Must("list", "--json")), &kids); err != nil || len(kids) != 1 {
		t.Fatalf("the kids are %+v, %v", kids, err)
	}
	return kids[0].Name
}
