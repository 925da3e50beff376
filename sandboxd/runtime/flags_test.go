package runtime

import (
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// judge applies the rules for call to its arguments, as the kernel does: what no rule matches is refused.
func judge(rules []specs.LinuxSyscall, call string, args ...uint64) (out []specs.LinuxSeccompAction) {
	for _, rule := range rules {
		if !slices.Contains(rule.Names, call) {
			continue
		}
		matches := true
		for _, a := range rule.Args {
			switch v := args[a.Index]; a.Op {
			case specs.OpEqualTo:
				matches = matches && v == a.Value
			case specs.OpGreaterThan:
				matches = matches && v > a.Value
			case specs.OpMaskedEqual:
				matches = matches && v&a.Value == a.ValueTwo
			default:
				panic("no rule uses " + a.Op)
			}
		}
		if matches {
			out = append(out, rule.Action)
		}
	}
	return out
}

func TestFlagRules(t *testing.T) {
	t.Parallel()
	const mapHuge, high = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_HUGETLB, 1 << 32
	pretend := []specs.LinuxSeccompAction{specs.ActErrno}
	allow := []specs.LinuxSeccompAction{specs.ActAllow}
	for _, c := range []struct {
		call   string
		args   []uint64
		noExec bool
		want   []specs.LinuxSeccompAction // none: refused
	}{
		{"mmap", []uint64{0, 1, 3, unix.MAP_PRIVATE | unix.MAP_ANONYMOUS, 0, 0}, false, allow},
		{"mmap", []uint64{0, 1, 3, mapHuge, 0, 0}, false, nil},
		{"mmap", []uint64{0, 1, 3, mapHuge | unix.MAP_HUGE_1GB, 0, 0}, false, nil},
		{"shmget", []uint64{0, 1, 0o1600}, false, allow},
		{"shmget", []uint64{0, 1, 0o5600}, false, nil},
		{"memfd_create", []uint64{0, unix.MFD_CLOEXEC}, false, allow},
		{"memfd_create", []uint64{0, unix.MFD_EXEC}, false, allow},
		{"memfd_create", []uint64{0, unix.MFD_HUGETLB}, false, nil},
		{"memfd_create", []uint64{0, unix.MFD_CLOEXEC}, true, nil},
		{"memfd_create", []uint64{0, unix.MFD_EXEC}, true, nil},
		{"memfd_create", []uint64{0, unix.MFD_NOEXEC_SEAL}, true, allow},
		{"memfd_create", []uint64{0, unix.MFD_NOEXEC_SEAL | unix.MFD_HUGETLB}, true, nil},
		{"setrlimit", []uint64{unix.RLIMIT_NOFILE, 1}, false, allow},
		{"setrlimit", []uint64{unix.RLIMIT_CORE, 1}, false, pretend},
		{"setrlimit", []uint64{unix.RLIMIT_CORE | high, 1}, false, pretend},
		{"setrlimit", []uint64{1000, 1}, false, nil},
		{"prlimit64", []uint64{0, unix.RLIMIT_AS, 1, 0}, false, allow},
		{"prlimit64", []uint64{0, unix.RLIMIT_CORE, 0, 1}, false, allow},
		{"prlimit64", []uint64{0, unix.RLIMIT_CORE, 1, 0}, false, pretend},
		{"prlimit64", []uint64{0, unix.RLIMIT_CORE | high, 1, 0}, false, pretend},
	} {
		if got := judge(flagRules(c.noExec), c.call, c.args...); !slices.Equal(got, c.want) {
			t.Errorf("%s%v, noexec %v: %v, want %v", c.call, c.args, c.noExec, got, c.want)
		}
	}
}

func TestNoExecReachesEveryWritablePlace(t *testing.T) {
	t.Parallel()
	s := testSpec()
	for _, s.NoExec = range []bool{false, true} {
		for _, m := range mounts(s) {
			writable := m.Type == "tmpfs" && m.Destination == "/tmp" || m.Destination == Home
			if writable && slices.Contains(m.Options, "noexec") != s.NoExec {
				t.Errorf("%s with %v, noexec %v", m.Destination, m.Options, s.NoExec)
			}
		}
	}
}

func TestNoLimitIsAboveOurOwn(t *testing.T) {
	t.Parallel()
	for _, l := range rlimits(1 << 40) {
		if l.Soft != l.Hard || l.Type == "RLIMIT_NOFILE" && l.Hard >= 1<<40 {
			t.Errorf("%+v", l)
		}
	}
}
