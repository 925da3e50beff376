package clients

import (
	"crypto/rand"
	"net/http/cgi"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/reason"
)

// git clones from git's own smart HTTP server, git http-backend, and is kept from pushing to it.
func git(t *testing.T, w *world) {
	serveGit(t, w)
	const inspected, uninspected = "https://git.vendor.test/git/project.git", "https://mirror.vendor.test/git/project.git"
	w.try(t, []attempt{
		{name: "inspected", line: "git clone -q " + inspected + " a && wc -c <a/data && git -C a fetch && git -C a log --format=%s", want: "300000\nfirst\n", agent: "git/"},
		{name: "not inspected", line: "GIT_SSL_CAINFO=$CA git clone -q " + uninspected + " b && wc -c <b/data", want: "300000\n", agent: "git/"},
		{name: "explicit, inspected", line: "git -c http.proxy=$PROXY clone -q " + inspected + " c && wc -c <c/data", want: "300000\n", agent: "git/"},
		{name: "explicit, not inspected", line: "GIT_SSL_CAINFO=$CA git -c http.proxy=$PROXY clone -q " + uninspected + " d && wc -c <d/data", want: "300000\n", agent: "git/"},
		{name: "denied path", line: "git clone -q https://git.vendor.test/private/project.git x", want: "The requested URL returned error: 403", code: reason.PathDenied, comm: "git"},
		{name: "push", line: "cd a && git -c user.name=k -c user.email=k@kid.test commit -q --allow-empty -m stolen && git push -q origin HEAD:stolen",
			want: "403", code: reason.PathDenied, comm: "git"},
		{name: "denied name", line: "git clone -q https://evil.test/git/project.git x", want: "Could not resolve host: evil.test", code: reason.NameNotAllowed, comm: "git"},
		{name: "denied name, explicit", line: "git -c http.proxy=$PROXY clone -q https://evil.test/git/project.git x", want: "response 403", code: reason.NameNotAllowed, comm: "git"},
	})
	for _, s := range w.box.Net.Shelf.Served() {
		if strings.HasSuffix(s.Path, "/git-receive-pack") {
			t.Errorf("a push reached the server: %+v", s)
		}
	}
}

// serveGit puts a repository with one commit of random bytes, to which anybody may push, on the shelf.
func serveGit(t *testing.T, w *world) {
	t.Helper()
	dir := t.TempDir()
	data := make([]byte, 300_000)
	rand.Read(data)
	if err := os.Mkdir(filepath.Join(dir, "work"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "work", "data"), data, 0o644); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command("git", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	run("init", "-q", "work")
	run("-C", "work", "add", "data")
	run("-C", "work", "-c", "user.name=t", "-c", "user.email=t@vendor.test", "commit", "-q", "-m", "first")
	run("clone", "-q", "--bare", "work", "project.git")
	run("-C", "project.git", "config", "http.receivepack", "true")
	w.box.Net.Shelf.Handle("/git/", &cgi.Handler{
		Path: filepath.Join(run("--exec-path"), "git-http-backend"), Root: "/git",
		Env: []string{"GIT_PROJECT_ROOT=" + dir, "GIT_HTTP_EXPORT_ALL=1", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null"},
	})
}
