package clients

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"tagout/internal/reason"
	"tagout/internal/testenv"
)

// apt updates from and downloads out of a small repository, by way of the explicit proxy as Debian machines are
// usually set up, without any privilege: all of its state is in the workspace.
func apt(t *testing.T, w *world) {
	serveApt(t, w)
	fetch := func(source, options string) string {
		return aptSetup + "echo 'deb [trusted=yes] " + source + " stable main' >$D/sources.list && apt-get -q " + options +
			" update && apt-get -q " + options + " download practice-hello && dpkg-deb -f practice-hello_*.deb Package Version && rm practice-hello_*.deb"
	}
	const http, https = "-o Acquire::http::Proxy=$PROXY", "-o Acquire::https::Proxy=$PROXY"
	const got = "Package: practice-hello\nVersion: 1.0"
	w.try(t, []attempt{
		{name: "explicit, plain", line: fetch(plain+"/apt", http), want: got, agent: "debian apt-http"},
		{name: "explicit, inspected", line: fetch(inspected+"/apt", https), want: got, agent: "debian apt-http"},
		{name: "explicit, not inspected", line: fetch(uninspected+"/apt", https+" -o Acquire::https::CaInfo=$CA"), want: got, agent: "debian apt-http"},
		{name: "inspected", line: fetch(inspected+"/apt", ""), want: got, agent: "debian apt-http"},
		{name: "denied path, plain", line: fetch(plain+"/secret", http), want: "403", code: reason.PathDenied, comm: "http"},
		{name: "denied path, inspected", line: fetch(inspected+"/secret", https), want: "403", code: reason.PathDenied, comm: "http"},
		{name: "denied name, plain", line: fetch("http://evil.test/apt", http), want: "403", code: reason.NameNotAllowed, comm: "http"},
		{name: "denied name", line: fetch(evil+"/apt", https), want: "403", code: reason.NameNotAllowed, comm: "http"},
		{name: "denied name, no proxy", line: fetch("http://evil.test/apt", ""), want: "evil.test", code: reason.NameNotAllowed, comm: "http"},
	})
}

// aptSetup makes directories of the kid's own in $D and points apt to nothing else.
const aptSetup = `D=$(mktemp -d /workspace/apt.XXXXXX) && cd $D && mkdir -p state/lists/partial cache/archives/partial etc && : >status && cat >apt.conf <<END
Dir "$D/";
Dir::State "state/";
Dir::State::status "$D/status";
Dir::Cache "cache/";
Dir::Etc "etc/";
Dir::Etc::sourcelist "$D/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Bin::methods "/usr/lib/apt/methods";
APT::Architecture "amd64";
APT::Architectures { "amd64"; };
APT::Update::Error-Mode "any";
Acquire::Languages "none";
Acquire::Retries "0";
END
export APT_CONFIG=$D/apt.conf && `

// serveApt puts a repository with one package on the shelf.
func serveApt(t *testing.T, w *world) {
	t.Helper()
	const about = "Package: practice-hello\nVersion: 1.0\nArchitecture: all\nMaintainer: Ada <ada@vendor.test>\nDescription: says hello\n"
	serveRepository(t, w.box, about, debOf(t, about, nil))
}

// serveRepository puts a repository with one package at /apt/ on the shelf. about is the package's control file.
func serveRepository(t *testing.T, box *testenv.Box, about string, deb []byte) {
	t.Helper()
	const debPath = "pool/practice_1.0_all.deb"
	packages := fmt.Sprintf("%sFilename: %s\nSize: %d\nSHA256: %x\n\n", about, debPath, len(deb), sha256.Sum256(deb))
	const index = "main/binary-amd64/Packages"
	release := fmt.Sprintf("Origin: practice\nSuite: stable\nCodename: stable\nDate: Thu, 01 Jan 2026 00:00:00 UTC\nArchitectures: amd64 all\nComponents: main\n"+
		"Acquire-By-Hash: no\nSHA256:\n %x %d %s\n", sha256.Sum256([]byte(packages)), len(packages), index)
	files := map[string][]byte{"dists/stable/Release": []byte(release), "dists/stable/" + index: []byte(packages), debPath: deb}
	box.Net.Shelf.Handle("GET /apt/", http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		content, ok := files[strings.TrimPrefix(r.URL.Path, "/apt/")]
		if !ok {
			http.NotFound(rw, r)
			return
		}
		rw.Write(content)
	}))
}

// debOf returns a package (deb(5)) with files by path, "./" first. Of these, what begins with "DEBIAN/" is for dpkg itself.
func debOf(t *testing.T, control string, files map[string]string) []byte {
	t.Helper()
	meta, data := map[string]string{"./control": control}, map[string]string{}
	for name, content := range files {
		if script, ok := strings.CutPrefix(name, "DEBIAN/"); ok {
			meta["./"+script] = content
		} else {
			data[name] = content
		}
	}
	var out bytes.Buffer
	out.WriteString("!<arch>\n")
	for _, member := range []struct {
		name    string
		content []byte
	}{
		{"debian-binary", []byte("2.0\n")},
		{"control.tar.gz", tgz(t, meta)},
		{"data.tar.gz", tgz(t, data)},
	} {
		fmt.Fprintf(&out, "%-16s%-12d%-6d%-6d%-8s%-10d`\n", member.name, 0, 0, 0, "100644", len(member.content))
		out.Write(member.content)
		if len(member.content)%2 == 1 {
			out.WriteByte('\n')
		}
	}
	return out.Bytes()
}

// tgz returns a compressed archive of files by name.
func tgz(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var out bytes.Buffer
	gz := gzip.NewWriter(&out)
	tw := tar.NewWriter(gz)
	for _, name := range slices.Sorted(maps.Keys(files)) { // directories before what is in them
		content := files[name]
		if strings.HasSuffix(name, "/") {
			if err := tw.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Typeflag: tar.TypeDir}); err != nil {
				t.Fatalf("packing %s: %v", name, err)
			}
			continue
		}
		err := tw.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(content)), Typeflag: tar.TypeReg})
		if err == nil {
			_, err = tw.Write([]byte(content))
		}
		if err != nil {
			t.Fatalf("packing %s: %v", name, err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	if err := gz.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}
