package main

import (
	"fmt"
	"runtime"
	"syscall"
)

var _ = register(technique{
	Name:   "ptrace",
	What:   "six pairs in which one traces the other and would hold it at its exit; half of the traced stand still",
	Layers: []string{"session"},
	Signs:  []sign{{What: "traced", N: 6}, {What: "processes", N: 13}},
	run: func(s *scene) error {
		for range 6 {
			if _, err := s.spawnRole("tracer"); err != nil {
				return err
			}
			if _, err := s.spawnRole("runner"); err != nil {
				return err
			}
		}
		return nil
	},
	roles: map[string]func(*scene){
		"tracer": func(s *scene) { trace(s, false) }, "runner": func(s *scene) { trace(s, true) }, "target": idle,
	},
})

const optTraceExit = 0x40 // PTRACE_O_TRACEEXIT (ptrace(2)): a dying tracee waits for its tracer

// trace starts a target under this process's own eyes; let says whether it may run.
func trace(s *scene, let bool) {
	runtime.LockOSThread() // a tracee belongs to a thread
	cmd := child(s.config, "target")
	cmd.SysProcAttr.Ptrace = true
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(cmd.Stderr, "tracing:", err) // the sign will be missing
		return
	}
	pid := cmd.Process.Pid
	var status syscall.WaitStatus
	syscall.Wait4(pid, &status, 0, nil) // it stops at its exec
	if err := syscall.PtraceSetOptions(pid, optTraceExit); err != nil {
		fmt.Fprintln(cmd.Stderr, "tracing:", err) // as above
	}
	if let {
		syscall.PtraceCont(pid, 0) // it runs on, watched
	}
	forever()
}
