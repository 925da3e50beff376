package runtime

import (
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

func testSpec() Spec {
	return Spec{
		ID: "k1", Root: "/r", Init: "/i", UserNS: "/u", NetNS: "/n", UIDFirst: 0x70010000, UIDCount: 65536, Cgroup: "/tagout.x/kids/k1",
		Limits: Limits{PIDs: 10, Memory: 1 << 20, CPUs: 1.5, OpenFiles: 64, DiskRate: 64 << 20}, Tmp: 1 << 20,
		Mounts: []Mount{{Source: "/usr", Target: "/usr", Tree: true}, {Source: "/a", Target: "/a"}, {Source: "/w", Target: Home, Writable: true}},
	}
}

func TestSeccompAllowsNothingForbidden(t *testing.T) {
	for _, noExec := range []bool{false, true} {
		checkProfile(t, noExec, false)
		checkProfile(t, noExec, true)
	}
}

func checkProfile(t *testing.T, noExec, onHost bool) {
	t.Helper()
	p, err := seccompProfile(Refusals{}, noExec, onHost)
	if err != nil {
		t.Fatal(err)
	}
	if p.DefaultAction != specs.ActErrno {
		t.Errorf("what no rule names is %s, want an errno", p.DefaultAction)
	}
	if len(p.Architectures) != 1 {
		t.Errorf("architectures %v: a second one is a second table of calls", p.Architectures)
	}
	for _, rule := range p.Syscalls {
		for _, name := range rule.Names {
			switch {
			case name == "socket", name == "socketpair": // TestSocketRulesLeaveNothingOut
				if len(rule.Names) != 1 || len(rule.Args) == 0 {
					t.Errorf("%s rule %+v: want one that looks at the family", name, rule)
				}
			case name == "mmap", name == "shmget", name == "memfd_create", name == "setrlimit", name == "prlimit64": // TestFlagRules
				if len(rule.Names) != 1 || len(rule.Args) == 0 {
					t.Errorf("%s rule %+v: want one that looks at the flags", name, rule)
				}
			case name == "clone3":
				if rule.Action != specs.ActErrno || rule.ErrnoRet == nil || *rule.ErrnoRet != uint(unix.ENOSYS) {
					t.Errorf("clone3 rule %+v: want ENOSYS", rule)
				}
			case name == "clone":
				if len(rule.Args) != 1 || rule.Args[0].Op != specs.OpMaskedEqual || rule.Args[0].Value&unix.CLONE_NEWUSER == 0 || rule.Args[0].ValueTwo != 0 {
					t.Errorf("clone rule %+v: want the namespace flags masked out", rule)
				}
			case rule.Action == specs.ActAllow && (slices.Contains(forbidden, name) || onHost && slices.Contains(serving, name)):
				t.Errorf("%s is allowed", name)
			}
		}
	}
}

func TestSpecGivesNothingAway(t *testing.T) {
	out, err := build(testSpec())
	if err != nil {
		t.Fatal(err)
	}
	for p, want := range map[*specs.Process][]string{
		out.Process: {"CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"}, process(Process{Argv: []string{"true"}, Dir: "/"}, KidUID): nil,
	} {
		c := p.Capabilities
		for _, set := range [][]string{c.Bounding, c.Effective, c.Permitted, c.Inheritable, c.Ambient} {
			if !slices.Equal(set, want) {
				t.Errorf("capabilities %+v, want %v in every set", c, want)
			}
		}
		if !p.NoNewPrivileges || p.User.UID == 0 || p.User.GID == 0 {
			t.Errorf("process %+v: root, or able to gain privileges", p)
		}
	}
	if !out.Root.Readonly || out.Linux.Seccomp == nil {
		t.Error("the root is writable or there is no seccomp filter")
	}
	kinds := map[specs.LinuxNamespaceType]string{}
	for _, ns := range out.Linux.Namespaces {
		kinds[ns.Type] = ns.Path
	}
	for _, kind := range []specs.LinuxNamespaceType{specs.PIDNamespace, specs.MountNamespace, specs.NetworkNamespace, specs.IPCNamespace, specs.UTSNamespace, specs.CgroupNamespace, specs.UserNamespace} {
		if _, ok := kinds[kind]; !ok {
			t.Errorf("no %s namespace of its own", kind)
		}
	}
	if kinds[specs.NetworkNamespace] != "/n" || kinds[specs.UserNamespace] != "/u" {
		t.Errorf("namespaces %v: not the pinned ones", kinds)
	}
	writable := []string{}
	for _, m := range out.Mounts {
		if m.Destination == "/sys" || m.Type == "sysfs" {
			t.Error("the kid gets a /sys")
		}
		if !slices.Contains(m.Options, "nosuid") {
			t.Errorf("mount %s without nosuid", m.Destination)
		}
		if m.Type == "bind" && !slices.Contains(m.Options, "ro") && !slices.Contains(m.Options, "rro") {
			writable = append(writable, m.Destination)
		}
		if m.Type == "proc" && !slices.Contains(m.Options, "hidepid=invisible") {
			t.Errorf("proc with %v: the kid sees kid-init", m.Options)
		}
		if m.Type == "tmpfs" && !strings.Contains(strings.Join(m.Options, " "), "size=") {
			t.Errorf("tmpfs %s without a size", m.Destination)
		}
	}
	if !slices.Equal(writable, []string{Home}) {
		t.Errorf("writable binds %v, want %s alone", writable, Home)
	}
	r := out.Linux.Resources
	if r.BlockIO == nil || len(r.BlockIO.ThrottleReadBpsDevice) == 0 || len(r.BlockIO.ThrottleWriteIOPSDevice) == 0 {
		t.Errorf("no disk is throttled: %+v", r.BlockIO)
	}
	if *r.Pids.Limit != 10 || *r.Memory.Limit != 1<<20 || *r.CPU.Quota != 150_000 || r.Devices[0].Allow {
		t.Errorf("resources %+v", r)
	}
}

func TestIncompleteSpecIsRefused(t *testing.T) {
	for name, damage := range map[string]func(*Spec){
		"id": func(s *Spec) { s.ID = "" }, "root": func(s *Spec) { s.Root = "" }, "netns": func(s *Spec) { s.NetNS = "" },
		"userns": func(s *Spec) { s.UserNS = "" }, "cgroup": func(s *Spec) { s.Cgroup = "" }, "uids": func(s *Spec) { s.UIDCount = 0 },
		"root's uid": func(s *Spec) { s.UIDFirst = 0 }, "tmp": func(s *Spec) { s.Tmp = 0 },
	} {
		s := testSpec()
		damage(&s)
		if s.check() == nil {
			t.Errorf("without %s: no error", name)
		}
	}
}
