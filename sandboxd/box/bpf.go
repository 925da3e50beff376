package box

import (
	"tagout/bpf"
	"tagout/internal/doctor"
	"tagout/internal/instance"
)

// KernelBPF is the real BPF.
type KernelBPF struct{}

// Install loads, attaches and pins the instance's programs.
func (KernelBPF) Install(i instance.Instance, kids string, daemons []string) error {
	return bpf.Install(bpf.Config{
		PinDir:        i.PinDir(),
		KidsCgroup:    kids,
		DaemonCgroups: daemons,
		KidLevel:      instance.KidCgroupLevel,
		Gateway:       i.Gateway(),
		KidNet:        i.KidNet(),
		Virtual:       i.VirtualNet(),
		BoxMark:       i.BoxMark(),
		GID:           i.GroupID(),
		KillUID:       i.UID(instance.Killswitchd),
	})
}

// Uninstall removes the instance's programs and pins.
func (KernelBPF) Uninstall(i instance.Instance, kids string, daemons []string) error {
	return bpf.Uninstall(i.PinDir(), kids, daemons)
}

// Features asks the kernel for what the programs need, in doctor's terms.
func (KernelBPF) Features() []doctor.Feature {
	var out []doctor.Feature
	for _, f := range bpf.Probe() {
		out = append(out, doctor.Feature(f))
	}
	return out
}
