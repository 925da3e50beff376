package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// technique is one way of resisting a stop. Each has a file of its own, technique_<name>.go, and puts itself
// into the registry there. It runs beside a small beacon (ticks to the sink and uses of the token), so that every
// layer has something alive to stop; the beacon tells the sink how far the technique has got.
type technique struct {
	Name   string   `json:"name"`
	What   string   `json:"what"`             // one line for people
	Layers []string `json:"layers"`           // which layers it makes hard to stop
	Signs  []sign   `json:"signs"`            // what an observer outside must see before a stop means anything
	Host   string   `json:"host,omitempty"`   // what the drill does from outside: freeze, or disk
	Replay int      `json:"replay,omitempty"` // a second, by the accomplice outside; 0: as many as usual

	parts string                  // of the agent; empty: ticks,token
	tune  func(*config)           // nil: nothing
	run   func(*scene) error      // in a process of its own; nil: the parts are all of it
	roles map[string]func(*scene) // of its child processes
}

// sign is something that an observer outside the kid counts.
//
//	processes      in the kid's cgroup
//	threads        of them all
//	renamed        processes that are called like a kernel thread
//	stopped        processes in state T
//	traced         processes with a tracer
//	uninterrupted  processes in state D
//	resident       MiB of them all; n = 0: most of what the card allows
//	files          open in one of them; n = 0: most of what the card allows
//	refused        forks, as the beacon told the sink
//	work           of the technique's own, as the beacon told the sink
//	bulk           bytes that the sink got of it
//	via            bytes that the sink got by the way named in Via
//	queued         bytes that the technique has sent and the sink's kernel has not got
//	http2          bytes of streams that the API got over HTTP/2
type sign struct {
	What string `json:"what"`
	N    int64  `json:"n"`
	Via  string `json:"via,omitempty"`
}

var registry = map[string]technique{}

func register(t technique) bool {
	registry[t.Name] = t
	return true
}

// listTechniques prints the registry as JSON, for the drill.
func listTechniques(w io.Writer) error {
	var all []technique
	for _, t := range registry {
		all = append(all, t)
	}
	slices.SortFunc(all, func(a, b technique) int { return cmp.Compare(a.Name, b.Name) })
	return json.NewEncoder(w).Encode(all)
}

// scene is what a running technique has.
type scene struct {
	config
	done, refused atomic.Int64 // told to the sink
}

func (s *scene) did()    { s.done.Add(1) }
func (s *scene) denied() { s.refused.Add(1) }

// tell prints "WORK REFUSED", as the beacon reads it.
func (s *scene) tell() { fmt.Println(s.done.Load(), s.refused.Load()) }

// playTechnique runs a technique, or one of its child processes, for ever.
func playTechnique(args []string) error {
	c, err := parse(args)
	if err != nil {
		return err
	}
	t, ok := registry[c.technique]
	if !ok {
		return fmt.Errorf("no technique is called %q", c.technique)
	}
	ignoreSignals()
	warmThreads(8)
	s := &scene{config: c}
	if c.role != "" {
		role := t.roles[c.role]
		if role == nil {
			return fmt.Errorf("technique %s has no part for %q", t.Name, c.role)
		}
		role(s)
		return nil
	}
	go func() {
		for {
			s.tell()
			time.Sleep(reportEvery)
		}
	}()
	if err := t.run(s); err != nil {
		return err
	}
	forever()
	return nil
}

// startTechnique runs the technique beside the beacon and starts it again when it dies.
func startTechnique(c config, counts *counts) {
	if registry[c.technique].run == nil {
		return
	}
	for {
		cmd := child(c, "")
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err == nil {
			counts.follow(out)
			cmd.Wait() // it ended, start another
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// child is this program as a part of its technique, in a session of its own.
func child(c config, role string) *exec.Cmd {
	args := []string{"technique"}
	c.role = role
	cmd := exec.Command("/proc/self/exe", append(args, c.args()...)...) // itself
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd
}

// spawnRole starts one child process with that role.
func (s *scene) spawnRole(role string) (*exec.Cmd, error) {
	cmd := child(s.config, role)
	return cmd, cmd.Start()
}

// forever blocks without the Go runtime calling it a deadlock.
func forever() {
	for {
		unix.Pause() // returns after a signal
	}
}

// idle is the role of a child that is only there.
func idle(*scene) { forever() }
