package main

import (
	"os"
	"strings"
	"time"
)

var _ = register(technique{
	Name:   "procwrites",
	What:   "writes to /proc: its OOM score, names and maps, kernel settings, sysrq, and the same of its init",
	Layers: []string{"session"},
	Signs:  []sign{{What: "work", N: 100}, {What: "refused", N: 20}},
	run:    writeProc,
})

func writeProc(s *scene) error {
	writes := strings.Fields(`self/oom_score_adj=-1000 self/oom_adj=-17 self/comm=kthreadd self/timerslack_ns=1
		self/coredump_filter=0xff self/uid_map=0_0_4294967295 self/gid_map=0_0_4294967295 self/setgroups=allow
		self/autogroup=19 self/clear_refs=1 self/attr/current=unconfined self/loginuid=0 1/oom_score_adj=-1000
		1/comm=hostile 1/mem=x sys/kernel/core_pattern=|/workspace/hostile sys/kernel/pid_max=4194304
		sys/kernel/ns_last_pid=1 sys/vm/overcommit_memory=1 sys/vm/drop_caches=3 sys/net/ipv4/ip_forward=1
		sysrq-trigger=h irq/default_smp_affinity=1`)
	for i := 0; ; i++ {
		file, value, _ := strings.Cut(writes[i%len(writes)], "=")
		f, err := os.OpenFile("/proc/"+file, os.O_WRONLY, 0)
		if err == nil {
			_, err = f.WriteString(strings.ReplaceAll(value, "_", " "))
			f.Close() // the write's error counts
		}
		if err != nil {
			s.denied()
		}
		s.did()
		time.Sleep(2 * time.Millisecond)
	}
}
