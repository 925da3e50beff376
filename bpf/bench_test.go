package bpf

import (
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// BenchmarkPacket measures one packet through each program, as the kernel's test run times it.
func BenchmarkPacket(b *testing.B) {
	rig := newBench(b, nil)
	for name, c := range map[string]struct {
		prog string
		p    packet
	}{
		"kid-pass":  {tagoutProgTagoutKidUp, packet{dst: tName, proto: tcp, dport: tPort, flags: ack}},
		"kid-deny":  {tagoutProgTagoutKidUp, packet{dst: tWorld, proto: tcp, dport: 80, flags: ack}},
		"link-pass": {tagoutProgTagoutLinkUp, packet{dst: tName, proto: tcp, dport: tPort, flags: ack}},
	} {
		b.Run(name, func(b *testing.B) {
			_, took, err := rig.coll.Programs[c.prog].Benchmark(c.p.fromKid().bytes(), b.N, b.ResetTimer)
			must(b, err)
			b.ReportMetric(float64(took.Nanoseconds()), "ns/packet")
		})
	}
}

// BenchmarkConnect measures connect(2) on a UDP socket in a kid's cgroup, and the hook's part of it.
func BenchmarkConnect(b *testing.B) {
	s, _ := installed(b, "tbpfn")
	w := newWorld(b)
	kid := w.start(b, s.kid)
	fd := kid.socket(v4, dgram)
	hook, err := ebpf.LoadPinnedProgram(filepath.Join(s.cfg.PinDir, progPin+tagoutProgTagoutConnect4), nil)
	must(b, err)
	defer hook.Close()
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	must(b, err)
	defer stats.Close()
	b.ResetTimer()
	kid.expect(request{Op: "reconnect", FD: fd, Addr: at(tGateway, 53), Len: b.N})
	b.StopTimer()
	st, err := hook.Stats()
	must(b, err)
	b.ReportMetric(float64(st.Runtime.Nanoseconds())/float64(st.RunCount), "hook-ns/op")
}
