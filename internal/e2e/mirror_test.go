package e2e

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"tagout/internal/testenv"
)

// mirror is an archive of Debian packages on the practice internet, at http://mirror.vendor.test/debian, signed with a key of
// its own. Its packages are the test's: the base of them is made of programs of this machine.
type mirror struct {
	t   *testing.T
	dir string // packages, and the signer's keys
	key []byte // what signs the archive, for gpgv(1)

	mu    sync.Mutex
	files map[string][]byte                        // by path below /debian/; guarded by mu
	spoil func(path string, content []byte) []byte // nil: nothing is; guarded by mu
	stall chan struct{}                            // closed when a package is asked for, and never given; nil: not; guarded by mu
	debs  map[string]deb                           // by name; guarded by mu
}

// deb is a package.
type deb struct {
	control string // without Package, Maintainer and Description
	files   map[string]string
	scripts map[string]string
	base    bool // it has the machine's programs too
}

const suite = "practice"

// openMirror serves an archive that has what an image cannot do without, and nothing else.
func openMirror(t *testing.T, box *testenv.Box) *mirror {
	t.Helper()
	m := &mirror{t: t, dir: t.TempDir(), files: map[string][]byte{}, debs: map[string]deb{}}
	m.makeKey()
	m.debs["practice-base"] = deb{control: "Version: 1\nArchitecture: all\nEssential: yes\nPriority: required\n", base: true, files: map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\n", "etc/group": "root:x:0:\n", "etc/debian_version": "practice\n",
	}}
	m.debs["apt"] = deb{control: "Version: 1\nArchitecture: all\n", files: map[string]string{"usr/share/apt/about": "no apt\n"}}
	m.publish()
	box.Net.Shelf.Handle("/debian/", http.HandlerFunc(m.serve))
	return m
}

func (m *mirror) serve(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimPrefix(r.URL.Path, "/debian/")
	m.mu.Lock()
	content, ok := m.files[path]
	if m.spoil != nil {
		content = m.spoil(path, content)
	}
	stall := m.stall
	if strings.HasSuffix(path, ".deb") && stall != nil {
		m.stall = make(chan struct{}) // nobody waits for the next one
	}
	m.mu.Unlock()
	switch {
	case !ok || content == nil:
		http.NotFound(w, r)
	case strings.HasSuffix(path, ".deb") && stall != nil:
		w.Header().Set("Content-Length", fmt.Sprint(len(content)))
		w.Write(content[:len(content)/2]) // the client is gone
		http.NewResponseController(w).Flush()
		close(stall)
		<-r.Context().Done()
	default:
		w.Write(content) // as above
	}
}

// set changes how the mirror behaves.
func (m *mirror) set(spoil func(path string, content []byte) []byte, stall chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.spoil, m.stall = spoil, stall
}

// put adds or replaces a package.
func (m *mirror) put(name string, d deb) {
	m.t.Helper()
	m.debs[name] = d
	m.publish()
}

// gpg runs gpg with the signer's keys.
func (m *mirror) gpg(stdin []byte, args ...string) []byte {
	m.t.Helper()
	cmd := exec.Command("gpg", append([]string{"--homedir", filepath.Join(m.dir, "gnupg"), "--batch", "--quiet", "--no-tty", "--pinentry-mode", "loopback", "--passphrase", ""}, args...)...)
	cmd.Stdin = bytes.NewReader(stdin)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		m.t.Fatalf("gpg %v: %v\n%s", args, err, errOut.String())
	}
	return out.Bytes()
}

func (m *mirror) makeKey() {
	m.t.Helper()
	home := filepath.Join(m.dir, "gnupg")
	if err := os.Mkdir(home, 0o700); err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() {
		if out, err := exec.Command("gpgconf", "--homedir", home, "--kill", "gpg-agent").CombinedOutput(); err != nil {
			m.t.Errorf("ending the signer's agent: %v: %s", err, out)
		}
	})
	m.gpg(nil, "--quick-gen-key", "practice archive", "ed25519", "sign", "never")
	m.key = m.gpg(nil, "--export")
}

// keyring writes what signs the archive to a file.
func (m *mirror) keyring() string {
	m.t.Helper()
	file := filepath.Join(m.dir, "keyring.gpg")
	if err := os.WriteFile(file, m.key, 0o600); err != nil {
		m.t.Fatal(err)
	}
	return file
}

// publish makes all packages and signs their list.
func (m *mirror) publish() {
	m.t.Helper()
	files := map[string][]byte{}
	var packages strings.Builder
	for _, name := range slices.Sorted(maps.Keys(m.debs)) {
		control := fmt.Sprintf("Package: %s\nMaintainer: Ada <ada@vendor.test>\nDescription: for practice\n%s", name, m.debs[name].control)
		raw, path := m.build(name, control, m.debs[name]), "pool/"+name+".deb"
		files[path] = raw
		fmt.Fprintf(&packages, "%sFilename: %s\nSize: %d\nSHA256: %x\n\n", control, path, len(raw), sha256.Sum256(raw))
	}
	index := "main/binary-amd64/Packages"
	files["dists/"+suite+"/"+index] = []byte(packages.String())
	release := fmt.Sprintf("Origin: practice\nSuite: %[1]s\nCodename: %[1]s\nDate: Thu, 01 Jan 2026 00:00:00 UTC\nArchitectures: amd64 all\nComponents: main\nAcquire-By-Hash: no\nSHA256:\n %x %d %s\n",
		suite, sha256.Sum256([]byte(packages.String())), packages.Len(), index)
	files["dists/"+suite+"/InRelease"] = m.gpg([]byte(release), "--clearsign")
	m.mu.Lock()
	defer m.mu.Unlock()
	m.files = files
}

// build makes a package with dpkg-deb.
func (m *mirror) build(name, control string, d deb) []byte {
	m.t.Helper()
	top, err := os.MkdirTemp(m.dir, name)
	if err != nil {
		m.t.Fatal(err)
	}
	defer os.RemoveAll(top)
	if err := os.Chmod(top, 0o755); err != nil { // the image's root directory
		m.t.Fatal(err)
	}
	write := func(path string, content []byte, mode os.FileMode) {
		file := filepath.Join(top, path)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil { // as above
			m.t.Fatal(err)
		}
		if err := os.WriteFile(file, content, mode); err != nil {
			m.t.Fatal(err)
		}
	}
	write("DEBIAN/control", []byte(control), 0o644)
	for script, text := range d.scripts {
		write("DEBIAN/"+script, []byte(text), 0o755)
	}
	for path, content := range d.files {
		write(path, []byte(content), 0o644)
	}
	if d.base {
		for path, from := range programs(m.t) {
			raw, err := os.ReadFile(from)
			if err != nil {
				m.t.Fatal(err)
			}
			write(path, raw, 0o755)
		}
	}
	out := filepath.Join(m.dir, name+".deb")
	if said, err := exec.Command("dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", top, out).CombinedOutput(); err != nil {
		m.t.Fatalf("dpkg-deb: %v\n%s", err, said)
	}
	raw, err := os.ReadFile(out)
	if err != nil {
		m.t.Fatal(err)
	}
	return raw
}

// baseTools are what dpkg and the builder's scripts call.
var baseTools = []string{"sh", "bash", "dpkg", "dpkg-deb", "dpkg-query", "dpkg-split", "dpkg-trigger", "tar", "rm", "cat", "chmod", "chown", "mkdir", "mknod", "mv", "ls", "id", "diff",
	"ldconfig", "start-stop-daemon", "mount", "sleep", "head", "unshare"}

// programs returns the machine's programs with their libraries: path in the image, below /usr alone -> file here.
func programs(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	inUsr := func(path string) string {
		path = strings.TrimPrefix(path, "/")
		if !strings.HasPrefix(path, "usr/") {
			path = "usr/" + path
		}
		return path
	}
	for _, tool := range baseTools {
		path, err := exec.LookPath(tool)
		if err != nil {
			t.Fatalf("the base of the practice archive: %v", err)
		}
		out[inUsr(path)] = path
		list, err := exec.Command("ldd", path).Output()
		if err != nil {
			continue // it is static, or a script
		}
		for _, word := range strings.Fields(string(list)) {
			if strings.HasPrefix(word, "/") {
				out[inUsr(word)] = word
			}
		}
	}
	return out
}
