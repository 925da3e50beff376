package runtime

import (
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

const (
	shmHugeTLB = 0o4000             // SHM_HUGETLB, shmget(2)
	word       = uint64(1<<32 - 1)  // of an argument that the kernel takes as 32 bits: what is above does not count
	rlimits64  = unix.RLIMIT_RTTIME // the last resource that prlimit(2) knows
)

// flagRules let calls through by their flags. Huge pages come out of a pool of the whole machine's and do not
// count as the kid's memory, so nobody gets any. Nobody sets a limit of core dumps: they are off, and at zero
// they would be on again for a machine that pipes them to a program (see noCore). Programs that set it to zero are
// told that they did, because some end where they cannot. noExec leaves out files in memory that could be executed.
func flagRules(noExec bool) []specs.LinuxSyscall {
	memfd := specs.LinuxSeccompArg{Index: 1, Value: unix.MFD_HUGETLB, Op: specs.OpMaskedEqual}
	if noExec {
		memfd.Value, memfd.ValueTwo = unix.MFD_HUGETLB|unix.MFD_NOEXEC_SEAL, unix.MFD_NOEXEC_SEAL
	}
	rules := []specs.LinuxSyscall{
		callRule("mmap", specs.ActAllow, specs.LinuxSeccompArg{Index: 3, Value: unix.MAP_HUGETLB, Op: specs.OpMaskedEqual}),
		callRule("shmget", specs.ActAllow, specs.LinuxSeccompArg{Index: 2, Value: shmHugeTLB, Op: specs.OpMaskedEqual}),
		callRule("memfd_create", specs.ActAllow, memfd),
	}
	for call, index := range map[string]uint{"setrlimit": 0, "prlimit64": 1} {
		for resource := range uint64(rlimits64 + 1) {
			if resource != unix.RLIMIT_CORE {
				rules = append(rules, callRule(call, specs.ActAllow, specs.LinuxSeccompArg{Index: index, Value: word, ValueTwo: resource, Op: specs.OpMaskedEqual}))
			}
		}
	}
	core := func(index uint) specs.LinuxSeccompArg {
		return specs.LinuxSeccompArg{Index: index, Value: word, ValueTwo: unix.RLIMIT_CORE, Op: specs.OpMaskedEqual}
	}
	done := uint(0)
	pretend := []specs.LinuxSyscall{callRule("setrlimit", specs.ActErrno, core(0)), callRule("prlimit64", specs.ActErrno, core(1), above(2, 0))}
	for _, rule := range pretend {
		rule.ErrnoRet = &done
		rules = append(rules, rule)
	}
	return append(rules, callRule("prlimit64", specs.ActAllow, core(1), equal(2, 0))) // asking is free
}
