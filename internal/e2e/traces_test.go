package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/netdump"
	"tagout/internal/testenv"
)

// traces lists all that there is of an instance on this machine, a line each that begins with its class. Two lists that
// are equal say that nothing came to stay in between. What a daemon knows counts only while it runs.
func traces(t testing.TB, inst instance.Instance) []string {
	t.Helper()
	var out []string
	for _, look := range []func(instance.Instance) ([]string, error){
		processTraces, mountTraces, linkTraces, cgroupTraces, bpfTraces, ruleTraces, fileTraces, tempTraces, keyTraces, slotTraces, memoryTraces,
	} {
		found, err := look(inst)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, found...)
	}
	slices.Sort(out)
	return out
}

// leftovers returns what of now was not there before; things of one description are counted.
func leftovers(before, now []string) []string {
	had := map[string]int{}
	for _, l := range before {
		had[l]++
	}
	var out []string
	for _, l := range now {
		if had[l]--; had[l] < 0 {
			out = append(out, l)
		}
	}
	return out
}

// wantNoTraces waits until nothing is there that was not before: killed processes wait to be reaped, and the kernel removes
// some things a moment later.
func wantNoTraces(box *testenv.Box, before []string) {
	box.T.Helper()
	box.Until(soon, "nothing is left", func() error {
		if left := leftovers(before, traces(box.T, box.Inst)); len(left) > 0 {
			return fmt.Errorf("%d things are left:\n%s", len(left), strings.Join(left, "\n"))
		}
		return nil
	})
}

// inRange says whether an id on this machine belongs to kids of the instance.
func inRange(inst instance.Instance, id uint64) bool {
	first, _ := inst.KidUIDRange(0)
	last, count := inst.KidUIDRange(instance.MaxKids)
	return id >= uint64(first) && id < uint64(last)+uint64(count)
}

// processTraces are processes that are in a cgroup of the instance, zombies among them, have a user of its kids, or name
// its directory; and the namespaces, processes and files of kids that its daemons hold.
func processTraces(inst instance.Instance) ([]string, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	var out []string
	for _, dir := range dirs {
		status, err := os.ReadFile(filepath.Join(dir, "status"))
		if err != nil {
			continue // it has ended
		}
		cgroups, _ := os.ReadFile(filepath.Join(dir, "cgroup"))
		args, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		who := firstField(status, "Name:") + " (" + firstField(status, "State:") + ")"
		who = strings.Replace(strings.Replace(who, "(R)", "(S)", 1), "(D)", "(S)", 1) // alive
		inside := strings.Contains(string(cgroups), inst.CgroupRel()+"/")
		if inside || strings.Contains(string(args), inst.RunDir()+"/") {
			out = append(out, "process "+who)
		}
		mapped, _ := os.ReadFile(filepath.Join(dir, "uid_map"))
		if f := strings.Fields(string(mapped)); len(f) == 3 && isIn(inst, f[1]) || isIn(inst, firstField(status, "Uid:")) {
			out = append(out, "uid range: process "+who+" as "+firstField(status, "Uid:"))
		}
		if strings.Contains(string(cgroups), inst.CgroupRel()+"/daemons/") {
			out = append(out, heldBy(inst, dir, firstField(status, "Name:"))...)
		}
	}
	return out, nil
}

func isIn(inst instance.Instance, id string) bool {
	n, err := strconv.ParseUint(id, 10, 32)
	return err == nil && inRange(inst, n)
}

func firstField(status []byte, key string) string {
	for line := range strings.Lines(string(status)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == key {
			return f[1]
		}
	}
	return ""
}

// heldBy lists what a daemon holds of kids: namespaces by descriptor or by a thread inside, processes, files.
func heldBy(inst instance.Instance, dir, daemon string) []string {
	var out []string
	fds, _ := filepath.Glob(filepath.Join(dir, "fd", "*"))
	for _, fd := range fds {
		to, _ := os.Readlink(fd) // closed meanwhile: empty
		kind, _, _ := strings.Cut(to, "[")
		switch {
		case slices.Contains([]string{"net:", "user:", "mnt:", "pid:", "ipc:", "uts:"}, kind):
			out = append(out, "namespace held by "+daemon+": "+kind)
		case strings.HasSuffix(to, "[pidfd]"), strings.Contains(to, inst.KidsCgroupRel()+"/"), strings.HasPrefix(to, filepath.Dir(inst.KidDir("x"))+"/"):
			out = append(out, "descriptor of "+daemon+": "+to)
		}
	}
	own, _ := os.Readlink(filepath.Join(dir, "ns/net"))
	threads, _ := filepath.Glob(filepath.Join(dir, "task/*/ns/net"))
	for _, thread := range threads {
		if in, err := os.Readlink(thread); err == nil && in != own {
			out = append(out, "namespace entered by a thread of "+daemon)
		}
	}
	return out
}

// mountTraces are mounts below the instance's directories. A pinned namespace is one.
func mountTraces(inst instance.Instance) ([]string, error) {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var out []string
	for line := range strings.Lines(string(raw)) {
		f := strings.Fields(line)
		if len(f) < 5 || !strings.HasPrefix(f[4], inst.RunDir()+"/") && !strings.HasPrefix(f[4], inst.StateDir()+"/") {
			continue
		}
		if strings.Contains(line, " nsfs ") {
			out = append(out, "namespace at "+f[4])
		} else {
			out = append(out, "mount "+f[4])
		}
	}
	return out, nil
}

// linkTraces are links with names of the instance's, and routes to its kids.
func linkTraces(inst instance.Instance) ([]string, error) {
	links, err := netdump.Whole(netlink.LinkList)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, l := range links {
		if name := l.Attrs().Name; strings.HasPrefix(name, inst.LinkPrefix()) || name == inst.GatewayLink() {
			out = append(out, "link "+name)
		}
	}
	routes, err := netdump.Whole(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(unix.AF_INET, &netlink.Route{}, netlink.RT_FILTER_TABLE)
	})
	for _, r := range routes {
		if r.Dst == nil {
			continue
		}
		if ip, ok := netip.AddrFromSlice(r.Dst.IP.To4()); ok && inst.KidNet().Contains(ip) {
			out = append(out, "route to "+r.Dst.String())
		}
	}
	return out, err
}

// cgroupTraces are cgroups of the instance in every hierarchy.
func cgroupTraces(inst instance.Instance) ([]string, error) {
	tops, err := filepath.Glob("/sys/fs/cgroup/*" + inst.CgroupRel())
	if err != nil {
		return nil, err
	}
	var out []string
	for _, top := range append(tops, "/sys/fs/cgroup"+inst.CgroupRel()) {
		err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err == nil && d.IsDir() {
				out = append(out, "cgroup "+path)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// bpfTraces are pins, and the entries of pinned maps that somebody has to remove: arrays have no others, and the oldest of
// an LRU map go by themselves.
func bpfTraces(inst instance.Instance) ([]string, error) {
	var out []string
	err := filepath.WalkDir(inst.PinDir(), func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || d.IsDir() {
			return err
		}
		out = append(out, "pin "+path)
		m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
		if err != nil {
			return nil // a link or a program
		}
		defer m.Close() // only read
		if m.Type() != ebpf.Hash && m.Type() != ebpf.LPMTrie {
			return nil
		}
		var key, value []byte
		it := m.Iterate()
		for it.Next(&key, &value) {
			out = append(out, fmt.Sprintf("map entry %s[%x]", d.Name(), key))
		}
		return it.Err()
	})
	return out, err
}

// ruleTraces are rules and chains of the firewall that name the instance, its links or its kids' addresses.
func ruleTraces(inst instance.Instance) ([]string, error) {
	var out []string
	for _, cmd := range []string{"iptables-save", "ip6tables-save", "iptables-legacy-save", "ip6tables-legacy-save"} {
		if _, err := exec.LookPath(cmd); err != nil {
			continue // this machine has no such rules
		}
		raw, err := exec.Command(cmd).Output()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", cmd, err)
		}
		net, _, _ := strings.Cut(inst.KidNet().String(), "0/")
		for line := range strings.Lines(string(raw)) {
			line, _, _ = strings.Cut(strings.TrimSpace(line), " [") // counters
			if strings.Contains(line, inst.ChainPrefix()+"-") || strings.Contains(line, inst.LinkPrefix()) || strings.Contains(line, net) {
				out = append(out, "rule "+cmd+" "+line)
			}
		}
	}
	return out, nil
}

// fileTraces are files below the instance's directories but for logs, which grow and turn over.
func fileTraces(inst instance.Instance) ([]string, error) {
	var out []string
	for _, top := range []string{inst.RunDir(), inst.StateDir()} {
		err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			switch {
			case errors.Is(err, fs.ErrNotExist):
				return nil
			case err != nil:
				return err
			case path == inst.AuditDir() || path == filepath.Join(inst.RunDir(), "log"):
				return fs.SkipDir
			}
			out = append(out, "file "+path)
			if info, err := d.Info(); err == nil && inRange(inst, uint64(info.Sys().(*syscall.Stat_t).Uid)) {
				out = append(out, "uid range: file "+path)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// tempTraces are files in the machine's temporary directories with names that the daemons or the runtime could give, or
// that belong to kids.
func tempTraces(inst instance.Instance) ([]string, error) {
	var out []string
	for _, dir := range []string{"/tmp", "/var/tmp", "/dev/shm"} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			info, err := e.Info()
			if err != nil {
				continue // it is gone
			}
			name, uid := e.Name(), uint64(info.Sys().(*syscall.Stat_t).Uid)
			if strings.HasPrefix(name, "runc") || strings.HasPrefix(name, ".new-") || strings.HasPrefix(name, ".doctor-") || inRange(inst, uid) {
				out = append(out, "temporary file "+filepath.Join(dir, name))
			}
		}
	}
	return out, nil
}

// keyTraces are users of the instance's kids for whom the kernel keeps keys (proc(5)).
func keyTraces(inst instance.Instance) ([]string, error) {
	raw, err := os.ReadFile("/proc/key-users")
	if err != nil {
		return nil, err
	}
	var out []string
	for line := range strings.Lines(string(raw)) {
		if uid, _, _ := strings.Cut(strings.TrimSpace(line), ":"); isIn(inst, uid) {
			out = append(out, "uid range: keys of "+uid)
		}
	}
	return out, nil
}

func slotTraces(inst instance.Instance) ([]string, error) {
	raw, err := os.ReadFile(filepath.Join(filepath.Dir(inst.RunDir()), ".slots", strconv.Itoa(inst.Slot())))
	if err != nil || strings.TrimSpace(string(raw)) != inst.Name() {
		return nil, nil // it is nobody's, or another's by now
	}
	return []string{"slot " + strconv.Itoa(inst.Slot())}, nil
}

// memoryTraces are what the daemons say that they know of kids.
func memoryTraces(inst instance.Instance) ([]string, error) {
	var out []string
	for daemon, names := range map[string][]string{
		instance.Sandboxd: {"tagout_sandboxd_kids"}, instance.DNSFilter: {"tagout_dnsfilter_sessions"},
		instance.Credd: {"tagout_credd_sessions", "tagout_credd_tokens"}, instance.Proxy: {"tagout_proxy_connections_active"},
	} {
		c := control.NewClient(inst.Socket(daemon))
		raw, err := metricsText(c)
		c.CloseIdle()
		if err != nil {
			continue // it does not run, and knows nothing
		}
		for line := range strings.Lines(raw) {
			f := strings.Fields(line)
			name, _, _ := strings.Cut(line, "{")
			if len(f) == 0 || !slices.Contains(names, strings.Fields(name)[0]) {
				continue
			}
			n, err := strconv.ParseFloat(f[len(f)-1], 64)
			if err != nil {
				return nil, err
			}
			for range int(n) {
				out = append(out, "memory of "+daemon+": "+f[0])
			}
		}
	}
	return out, nil
}

func metricsText(c *control.Client) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	resp, err := c.Do(ctx, http.MethodGet, "/metrics", nil, "")
	if err != nil {
		return "", err
	}
	defer resp.Body.Close() // read to the end
	raw, err := io.ReadAll(resp.Body)
	return string(raw), err
}
