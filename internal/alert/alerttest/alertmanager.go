package alerttest

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"tagout/internal/testroot"
)

// alertmanagerConfig routes everything to nobody: what it has is read through its API.
const alertmanagerConfig = "route: {receiver: nobody}\nreceivers: [{name: nobody}]\n"

// Alertmanager is a running prometheus-alertmanager.
type Alertmanager struct {
	URL string
	t   testing.TB
}

// Firing is an alert as the API v2 shows it.
type Firing struct {
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
	StartsAt    time.Time         `json:"startsAt"`
	EndsAt      time.Time         `json:"endsAt"`
	Status      struct {
		State string `json:"state"`
	} `json:"status"`
}

// StartAlertmanager starts Debian's prometheus-alertmanager on loopback, with a directory of its own, until the
// test ends. `deploy/setup.sh test` installs it.
func StartAlertmanager(t testing.TB) *Alertmanager {
	t.Helper()
	testroot.Require(t)
	binary, err := exec.LookPath("prometheus-alertmanager")
	if err != nil {
		t.Fatalf("%v: run `deploy/setup.sh test` to install it", err)
	}
	dir := t.TempDir()
	config := filepath.Join(dir, "config.yml")
	if err := os.WriteFile(config, []byte(alertmanagerConfig), 0o600); err != nil {
		t.Fatal(err)
	}
	address := freeAddress(t)
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { log.Close() })
	cmd := exec.Command(binary, "--config.file="+config, "--storage.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+address, "--cluster.listen-address=")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill() // it may have ended already
		cmd.Wait()         // as above
	})
	a := &Alertmanager{URL: "http://" + address, t: t}
	deadline := time.Now().Add(30 * time.Second)
	for {
		resp, err := http.Get(a.URL + "/-/ready")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return a
			}
			err = fmt.Errorf("it answers %d", resp.StatusCode)
		}
		if time.Now().After(deadline) {
			raw, _ := os.ReadFile(log.Name())
			t.Fatalf("prometheus-alertmanager does not come up: %v\n%s", err, raw)
		}
		time.Sleep(20 * time.Millisecond) // between looks at a condition
	}
}

func freeAddress(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// Alerts returns what it has, resolved alerts left out.
func (a *Alertmanager) Alerts() []Firing {
	a.t.Helper()
	resp, err := http.Get(a.URL + "/api/v2/alerts")
	if err != nil {
		a.t.Fatal(err)
	}
	defer resp.Body.Close()
	var out []Firing
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil {
		a.t.Fatal(err)
	}
	return out
}
