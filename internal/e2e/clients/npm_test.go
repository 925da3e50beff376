package clients

import (
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"testing"

	"tagout/internal/reason"
)

// npm installs a package from a small registry and is kept from publishing to it.
func npm(t *testing.T, w *world) {
	serveNpm(t, w)
	run := func(env, command, registry string) string {
		return "D=$(mktemp -d /workspace/npm.XXXXXX) && cd $D && echo '{\"name\":\"kid\",\"version\":\"1.0.0\"}' >package.json && " + env +
			" npm " + command + " --registry " + registry + " --no-audit --no-fund --no-update-notifier --fetch-retries 0 --cache $D/cache"
	}
	const use = " && node -e 'console.log(require(\"practice-hello\"))'"
	w.try(t, []attempt{
		{name: "inspected", line: run("", "install practice-hello", inspected+"/npm/") + use, want: "hello from npm", agent: "npm/"},
		{name: "not inspected", line: run("", "install practice-hello --cafile $CA", uninspected+"/npm/") + use, want: "hello from npm", agent: "npm/"},
		{name: "explicit, inspected", line: run("https_proxy=$PROXY", "install practice-hello", inspected+"/npm/") + use, want: "hello from npm", agent: "npm/"},
		{name: "denied path", line: run("", "install practice-hello", inspected+"/secret/"), want: "403 Forbidden", code: reason.PathDenied, comm: "n"},
		{name: "publish", line: run("", "publish --//registry.vendor.test/npm/:_authToken=x", inspected+"/npm/"), want: "403 Forbidden", code: reason.MethodDenied, comm: "n"},
		{name: "denied name", line: run("", "install practice-hello", evil+"/npm/"), want: "evil.test", code: reason.NameNotAllowed, comm: "n"},
	})
}

// serveNpm puts a registry with one package on the shelf; tarballs come from the host that was asked.
func serveNpm(t *testing.T, w *world) {
	t.Helper()
	tarball := tgz(t, map[string]string{
		"package/package.json": `{"name":"practice-hello","version":"1.0.0","main":"index.js"}`,
		"package/index.js":     `module.exports = "hello from npm"`,
	})
	sum := sha512.Sum512(tarball)
	shelf := w.box.Net.Shelf
	shelf.Handle("GET /npm/practice-hello", http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		version := map[string]any{"name": "practice-hello", "version": "1.0.0", "main": "index.js", "dist": map[string]string{
			"tarball":   "https://" + r.Host + "/npm/practice-hello/-/practice-hello-1.0.0.tgz",
			"integrity": "sha512-" + base64.StdEncoding.EncodeToString(sum[:]),
		}}
		rw.Header().Set("Content-Type", "application/json")
		json.NewEncoder(rw).Encode(map[string]any{
			"name": "practice-hello", "dist-tags": map[string]string{"latest": "1.0.0"}, "versions": map[string]any{"1.0.0": version},
		})
	}))
	shelf.Handle("GET /npm/practice-hello/-/practice-hello-1.0.0.tgz", http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		rw.Write(tarball)
	}))
}
