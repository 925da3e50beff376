package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"tagout/bpf"
	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/testenv"
)

// leave is one thing that a kid could leave: how it is made, and how it is taken away again.
type leave struct {
	class      string // what traces calls it
	make, undo func() error
}

// TestEveryLeftoverIsNoticed is the control of wantNoTraces: one of each is left on purpose, is seen for what it is, and is
// seen no more when it is gone. And once the box is removed, there is no trace of it at all.
func TestEveryLeftoverIsNoticed(t *testing.T) {
	t.Parallel()
	var inst instance.Instance
	t.Cleanup(func() { // after the box was removed
		if left := traces(t, inst); len(left) > 0 {
			t.Errorf("after the box is gone:\n%s", strings.Join(left, "\n"))
		}
	})
	box := start(t)
	inst = box.Inst
	box.Destroy(box.Spawn(bareCard, nil).Name)
	before := traces(t, inst)
	if !strings.Contains(strings.Join(before, "\n"), fmt.Sprintf("slot %d", inst.Slot())) {
		t.Error("the box's own slot is not seen")
	}
	for _, l := range leaves(t, box) {
		if err := l.make(); err != nil {
			t.Fatalf("leaving a %s: %v", l.class, err)
		}
		found := leftovers(before, traces(t, inst))
		if !strings.Contains("\n"+strings.Join(found, "\n"), "\n"+l.class) {
			t.Errorf("a %s is left, and seen are: %v", l.class, found)
		}
		if err := l.undo(); err != nil {
			t.Fatalf("taking a %s away: %v", l.class, err)
		}
		wantNoTraces(box, before)
	}
}

func leaves(t *testing.T, box *testenv.Box) []leave {
	inst := box.Inst
	layout, err := cgroup.Detect()
	if err != nil {
		t.Fatal(err)
	}
	maps, err := bpf.Open(inst.PinDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { maps.Close() })
	stray, link := inst.KidsCgroupRel()+"/stray", inst.LinkPrefix()+"250"
	at := filepath.Dir(inst.KidDir("x")) + "/stray"
	pin, mark := filepath.Join(inst.PinDir(), "stray"), inst.SessionMark(0xfffff)
	first, _ := inst.KidUIDRange(200)
	_, routed := inst.KidAddrs(250)
	return []leave{
		{"cgroup ", func() error { return layout.Create(stray) }, func() error { return layout.Remove(context.Background(), stray) }},
		lasting(t, "process ", "exec sleep 1000", layout.V2(inst.KidsCgroupRel()), nil),
		lasting(t, "namespace held by ", "exec 9</proc/self/ns/net; exec sleep 1000", layout.V2(inst.DaemonCgroupRel(instance.Sandboxd)), nil),
		lasting(t, "descriptor of ", "exec 9<"+layout.V2(inst.KidsCgroupRel())+"/cgroup.procs; exec sleep 1000", layout.V2(inst.DaemonCgroupRel(instance.Sandboxd)), nil),
		lasting(t, "uid range: process ", "exec sleep 1000", "", &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{HostID: int(first), Size: 1000}}, GidMappings: []syscall.SysProcIDMap{{HostID: int(first), Size: 1000}}}),
		{"uid range: file ", func() error { return commands("touch "+at, fmt.Sprintf("chown %d %s", first, at)) }, func() error { return os.Remove(at) }},
		{"namespace at ", func() error {
			return commands("touch "+inst.NetNSDir()+"/stray", "unshare --net="+inst.NetNSDir()+"/stray true")
		}, func() error { return commands("umount "+inst.NetNSDir()+"/stray", "rm "+inst.NetNSDir()+"/stray") }},
		{"mount ", func() error { return commands("mkdir "+at, "mount -t tmpfs none "+at) }, func() error { return commands("umount "+at, "rmdir "+at) }},
		{"link ", func() error { return commands("ip link add " + link + " type veth peer name " + link + "q") }, func() error { return commands("ip link del " + link) }},
		{"route to ", func() error { return commands(fmt.Sprintf("ip route add unreachable %v/32", routed)) },
			func() error { return commands(fmt.Sprintf("ip route del unreachable %v/32", routed)) }},
		{"pin ", func() error {
			m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
			if err != nil {
				return err
			}
			defer m.Close() // the pin keeps it
			return m.Pin(pin)
		}, func() error { return os.Remove(pin) }},
		{"map entry ", func() error { return maps.PutKid(1<<40, 0, mark) }, func() error { return maps.DeleteKid(1<<40, 0) }},
		{"rule iptables-save ", func() error { return commands("iptables -w -N " + inst.ChainPrefix() + "-stray") },
			func() error { return commands("iptables -w -X " + inst.ChainPrefix() + "-stray") }},
		{"rule ip6tables-save ", func() error { return commands("ip6tables -w -A FORWARD -i " + link + " -j DROP") },
			func() error { return commands("ip6tables -w -D FORWARD -i " + link + " -j DROP") }},
		{"file ", func() error { return os.WriteFile(at, nil, 0o600) }, func() error { return os.Remove(at) }},
		{"temporary file ", func() error { return commands("touch /tmp/runc-" + inst.Name()) }, func() error { return commands("rm /tmp/runc-" + inst.Name()) }},
		{"memory of sandboxd: ", func() error { _, err := box.TrySpawn("stray", bareCard, nil); return err }, func() error { box.Destroy("stray"); return nil }},
	}
}

// lasting is a process that does not end, in the cgroup at dir where that is not empty; attr, which may be nil, is how it
// starts.
func lasting(t *testing.T, class, line, dir string, attr *syscall.SysProcAttr) leave {
	cmd := exec.Command("/bin/sh", "-c", "read go; "+line)
	cmd.SysProcAttr = attr
	t.Cleanup(func() {
		if cmd.Process != nil && cmd.ProcessState == nil {
			cmd.Process.Kill() // the test has failed before
			cmd.Wait()         // as is meant
		}
	})
	return leave{class, func() error {
		in, err := cmd.StdinPipe()
		if err != nil {
			return err
		}
		if err := cmd.Start(); err != nil {
			return err
		}
		if dir != "" {
			err = cgroup.Join(dir, cmd.Process.Pid)
		}
		if err == nil {
			_, err = in.Write([]byte("\n"))
		}
		return errors.Join(err, becomes(cmd.Process.Pid, "sleep"))
	}, func() error {
		cmd.Process.Kill() // it sleeps
		cmd.Wait()         // as is meant
		return nil
	}}
}

// becomes waits until the process runs the program.
func becomes(pid int, program string) error {
	for deadline := time.Now().Add(soon); ; {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if err != nil || strings.TrimSpace(string(raw)) == program {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("process %d is still %s", pid, raw)
		}
		time.Sleep(time.Millisecond) // between looks
	}
}

// commands runs each and says which failed.
func commands(lines ...string) error {
	for _, line := range lines {
		f := strings.Fields(line)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		out, err := exec.CommandContext(ctx, f[0], f[1:]...).CombinedOutput()
		cancel()
		if err != nil {
			return fmt.Errorf("%s: %w: %s", line, err, out)
		}
	}
	return nil
}
