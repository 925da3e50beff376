// Package archtest keeps the package graph as docs/architecture.md draws it: arrows go down, and each big
// dependency is known to the packages that need it and no others.
package archtest

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

type pkg struct {
	ImportPath   string
	Imports      []string
	TestImports  []string
	XTestImports []string
}

func load(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Imports,TestImports,XTestImports", "tagout/...")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pkgs []pkg
	dec := json.NewDecoder(out)
	for {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("listing packages: %v", err)
	}
	if len(pkgs) < 10 {
		t.Fatalf("only %d packages were listed: the test would prove nothing", len(pkgs))
	}
	return pkgs
}

// under says whether path is root or a package below it.
func under(path, root string) bool {
	return path == root || strings.HasPrefix(path, root+"/")
}

// daemons are the packages that must not know each other.
var daemons = []string{"tagout/proxy", "tagout/dnsfilter", "tagout/killswitch", "tagout/bpf", "tagout/sandboxd"}

// allowed are the arrows between daemon packages that exist all the same: setting up a box loads its BPF.
var allowed = map[string][]string{"tagout/sandboxd/box": {"tagout/bpf"}}

// violations returns one line a wrong arrow.
func violations(pkgs []pkg) []string {
	var out []string
	for _, p := range pkgs {
		for _, imp := range p.Imports {
			if why := wrong(p.ImportPath, imp); why != "" {
				out = append(out, p.ImportPath+" imports "+imp+": "+why)
			}
		}
	}
	return out
}

func wrong(from, to string) string {
	if under(to, "tagout/cmd") {
		return "nothing imports a main"
	}
	if under(from, "tagout/internal") {
		for _, d := range daemons {
			if under(to, d) {
				return "internal packages do not know the daemons"
			}
		}
	}
	for _, d := range daemons {
		for _, other := range daemons {
			if under(from, d) && under(to, other) && d != other && !slices.Contains(allowed[from], to) {
				return "daemon packages do not know each other"
			}
		}
	}
	for dep, owners := range owned {
		if under(to, dep) && !slices.ContainsFunc(owners, func(o string) bool { return under(from, o) }) {
			return "only " + strings.Join(owners, ", ") + " may know it"
		}
	}
	return ""
}

// owned names, for each big dependency, the packages that may import it.
var owned = map[string][]string{
	"github.com/elazarl/goproxy":             {"tagout/proxy", "tagout/internal/bench/peers/goproxy"}, // the second is the bare library, to measure by
	"github.com/miekg/dns":                   {"tagout/dnsfilter", "tagout/internal/practice"},
	"github.com/cilium/ebpf":                 {"tagout/bpf"},
	"github.com/coreos/go-iptables":          {"tagout/internal/netfw"},
	"github.com/prometheus/client_golang":    {"tagout/internal/metrics"},
	"github.com/containerd/go-runc":          {"tagout/sandboxd"},
	"github.com/goccy/go-yaml":               {"tagout/internal/card", "tagout/internal/config", "tagout/internal/yamlx"},
	"github.com/danielgtaylor/huma/v2":       {"tagout/sandboxd/api"},
	"github.com/modelcontextprotocol/go-sdk": {"tagout/sandboxd/mcp"},
	"github.com/spf13/cobra":                 {"tagout/cmd/tagout"},
	"github.com/coder/websocket":             {"tagout/internal/execsocket"},
	"go.opentelemetry.io/proto/otlp":         {"tagout/internal/auditstream"},
	"modernc.org/sqlite":                     {"tagout/internal/auditindex"},
	"golang.org/x/term":                      {"tagout/cmd/tagout"},
	"github.com/creack/pty":                  {"tagout/internal/testpty"},
	"filippo.io/age":                         {"tagout/internal/audit/seal", "tagout/sandboxd/auditkeep", "tagout/internal/authority/keyfile", "tagout/internal/credential", "tagout/internal/inspectca", "tagout/internal/vaultseal"},

	"github.com/go-jose/go-jose/v4":  {"tagout/internal/issuer", "tagout/tokencheck", "tagout/internal/provider"},
	"github.com/spiffe/go-spiffe/v2": {"tagout/internal/issuer"},

	"github.com/google/go-containerregistry": {"tagout/sandboxd/image/oci"},
	"github.com/klauspost/compress":          {"tagout/sandboxd/image/oci", "tagout/proxy"}, // zstd
	"github.com/andybalholm/brotli":          {"tagout/proxy"},
	"github.com/aws/aws-sdk-go-v2":           {"tagout/internal/provider", "tagout/proxy"},
	"github.com/zricethezav/gitleaks/v8":     {"tagout/internal/leaks"},
}

func TestArrowsGoDown(t *testing.T) {
	for _, v := range violations(load(t)) {
		t.Error(v)
	}
}

func TestPureStaysPure(t *testing.T) {
	banned := []string{"os", "net", "net/http", "time", "io/fs", "os/exec", "syscall", "golang.org/x/sys/unix"}
	seen := 0
	for _, p := range load(t) {
		if p.ImportPath != "tagout/internal/policy" && p.ImportPath != "tagout/internal/vaddr" {
			continue
		}
		seen++
		for _, imp := range p.Imports {
			if slices.Contains(banned, imp) {
				t.Errorf("%s imports %s: it must stay free of I/O and clocks", p.ImportPath, imp)
			}
		}
	}
	if seen != 2 {
		t.Fatalf("%d pure packages were found, want 2", seen)
	}
}

func TestTheCheckSeesWrongArrows(t *testing.T) {
	for _, p := range []pkg{
		{ImportPath: "tagout/proxy", Imports: []string{"tagout/dnsfilter"}},
		{ImportPath: "tagout/internal/policy", Imports: []string{"tagout/proxy"}},
		{ImportPath: "tagout/dnsfilter", Imports: []string{"github.com/elazarl/goproxy"}},
		{ImportPath: "tagout/sandboxd/kids", Imports: []string{"github.com/cilium/ebpf/link"}},
		{ImportPath: "tagout/sandboxd", Imports: []string{"tagout/cmd/tagout"}},
	} {
		if len(violations([]pkg{p})) == 0 {
			t.Errorf("%s may import %v unseen", p.ImportPath, p.Imports)
		}
	}
}
