// Package supervise runs an instance's daemons: each as its own user with its own few capabilities, in a
// cgroup of its own, with its standard error in a log file. It starts them in order and waits for each to be
// healthy, starts one again when it dies, and stops them in the reverse order.
//
// A supervisor that is killed leaves the daemons running, so that a stop still works; the next supervisor
// kills them through their cgroups and starts its own. Nothing here decides anything about kids: while a
// daemon is down, whatever needed it is denied.
package supervise

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/instance"
	"tagout/internal/lease"
)

// Spec describes one daemon. Everything is absolute and resolved.
type Spec struct {
	Name    string
	Path    string   // the binary
	Args    []string // without argv[0]
	Env     []string // the whole environment, KEY=value
	UID     int
	GID     int
	Caps    []uintptr // ambient capabilities; ignored by root, who has them
	Nice    int       // setpriority(2); below 0: before others. What a machine does not allow is gone without
	Cgroup  string    // directory in the v2 hierarchy; must exist and belong to this daemon alone
	Socket  string    // where GET /healthz is answered
	LogFile string
	PidFile string
	Unlock  string // file that it gets open, as instance.UnlockEnv says; opened anew at every start; empty: none

	// Watchdog is how long the daemon may go without saying, over sd_notify, that it makes progress, before it is
	// killed and started again; 0: it says nothing.
	Watchdog time.Duration
	// Quick is how often it is started again within 100 ms before the wait grows.
	Quick int
}

// Cgroups is what the supervisor needs of the cgroup hierarchy.
type Cgroups interface {
	V2(rel string) string // absolute directory of a cgroup in the v2 hierarchy
	Kill(dir string) error
	WaitEmpty(ctx context.Context, dir string) error
}

// Config says what to run. Inst, BinDir, Log and Cgroups are needed.
type Config struct {
	Inst    instance.Instance
	BinDir  string // holds one binary a daemon, named after it
	Log     *slog.Logger
	Cgroups Cgroups
	Ready   func()        // called once, when all daemons are healthy; nil: nobody is told
	Specs   []Spec        // in start order; nil: Specs(Inst, BinDir, Cgroups)
	Start   time.Duration // how long one daemon may take to become healthy; 0: 15 s
	Grace   time.Duration // between SIGTERM and cgroup.kill; 0: 5 s
	Unlock  string        // file with what opens the vault, for credd, in the default Specs; empty: none

	Watchdog time.Duration // killswitchd's, in the default Specs; 0: lease.Default's
	Alive    func()        // called every second while Up works; nil: nobody is told
}

// DefaultSpecs returns the five daemons in start order.
func DefaultSpecs(inst instance.Instance, binDir string, cg Cgroups) []Spec {
	caps := map[string][]uintptr{
		instance.Killswitchd: {unix.CAP_BPF, unix.CAP_NET_ADMIN, unix.CAP_IPC_LOCK},
		instance.Credd:       {unix.CAP_IPC_LOCK},
		instance.DNSFilter:   {unix.CAP_NET_BIND_SERVICE},
		instance.Proxy:       {unix.CAP_NET_RAW}, // SO_MARK, since Linux 5.17 (socket(7))
	}
	// The two that a stop waits for must not queue behind hundreds of runnable processes of a kid: a credd that is
	// late is killed, and with it die the tokens of every kid.
	nice := map[string]int{instance.Killswitchd: -20, instance.Credd: -20}
	own := map[string][]string{instance.Proxy: {"GODEBUG=" + instance.Forgetful}} // or it starts itself again with that
	var out []Spec
	for _, d := range instance.Daemons() {
		gid := inst.GroupID()
		if inst.UID(d) == 0 {
			gid = 0
		}
		out = append(out, Spec{
			Name:    d,
			Path:    filepath.Join(binDir, d),
			Args:    []string{"--instance", inst.Name()},
			Env:     append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "TAGOUT_BIN=" + binDir}, own[d]...),
			UID:     inst.UID(d),
			GID:     gid,
			Caps:    caps[d],
			Nice:    nice[d],
			Cgroup:  cg.V2(inst.DaemonCgroupRel(d)),
			Socket:  inst.Socket(d),
			LogFile: filepath.Join(inst.RunDir(), "log", d+".log"),
			PidFile: inst.PidFile(d),
		})
	}
	return out
}

// Up starts the daemons and keeps them running until ctx ends, then stops them and returns nil. It returns an
// error, with everything stopped again, where a daemon cannot be started; a daemon that dies later is started
// again for as long as it takes. It needs root and a directory tree made by `tagout setup`.
func Up(ctx context.Context, cfg Config) error {
	cfg = withDefaults(cfg)
	if err := checkBinaries(cfg.Specs); err != nil {
		return err
	}
	unlock, err := lock(cfg.Inst)
	if err != nil {
		return err
	}
	defer unlock()
	if err := placeBinaries(cfg); err != nil {
		return err
	}
	// Stale daemons go before the first new one starts: a predecessor's proxy would hold the new one's port.
	for i := len(cfg.Specs) - 1; i >= 0; i-- {
		if err := sweep(ctx, cfg, cfg.Specs[i]); err != nil {
			return err
		}
	}
	var running []*keeper
	defer func() {
		for i := len(running) - 1; i >= 0; i-- {
			running[i].stop()
		}
	}()
	for _, s := range cfg.Specs {
		k, err := keep(ctx, cfg, s)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("starting %s: %w", s.Name, err)
		}
		running = append(running, k)
	}
	if cfg.Ready != nil {
		cfg.Ready()
	}
	stayAlive(ctx, cfg.Alive)
	return nil
}

// alivePeriod is how often Config.Alive is called.
const alivePeriod = time.Second

// stayAlive returns when ctx ends.
func stayAlive(ctx context.Context, alive func()) {
	if alive == nil {
		<-ctx.Done()
		return
	}
	for {
		alive()
		if !pause(ctx, alivePeriod) {
			return
		}
	}
}

// quickRestarts is how often killswitchd is started again at once: while it is away, a lease runs.
const quickRestarts = 20

func withDefaults(cfg Config) Config {
	if cfg.Watchdog == 0 {
		cfg.Watchdog = lease.Default.Watchdog
	}
	if cfg.Specs == nil {
		cfg.Specs = DefaultSpecs(cfg.Inst, cfg.BinDir, cfg.Cgroups)
		for i := range cfg.Specs {
			if cfg.Specs[i].Name == instance.Killswitchd {
				cfg.Specs[i].Watchdog, cfg.Specs[i].Quick = cfg.Watchdog, quickRestarts
			}
			if cfg.Specs[i].Name == instance.Credd {
				cfg.Specs[i].Unlock = cfg.Unlock
			}
		}
	}
	cfg.Specs = append([]Spec(nil), cfg.Specs...) // placeBinaries changes paths
	if cfg.Start == 0 {
		cfg.Start = 15 * time.Second
	}
	if cfg.Grace == 0 {
		cfg.Grace = 5 * time.Second
	}
	return cfg
}

// lock makes sure that one supervisor runs an instance, and notes which; the kernel drops the lock when it
// dies.
func lock(inst instance.Instance) (unlock func(), err error) {
	f, err := os.OpenFile(lockFile(inst), os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("instance %s is not set up: run `tagout setup --instance %s` first", inst.Name(), inst.Name())
	}
	if err != nil {
		return nil, fmt.Errorf("opening the supervisor's lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close() // nothing was written
		return nil, fmt.Errorf("instance %s is already up: another `tagout up --instance %s` runs it", inst.Name(), inst.Name())
	}
	// Ten digits: a shorter pid never leaves the end of a longer one behind it.
	if _, err := f.WriteAt(fmt.Appendf(nil, "%010d\n", os.Getpid()), 0); err != nil {
		f.Close() // already failing
		return nil, fmt.Errorf("writing the supervisor's lock: %w", err)
	}
	return func() { f.Close() }, nil // nothing that matters was written
}

// sweep kills whatever is in the daemon's cgroup and waits until it is gone.
func sweep(ctx context.Context, cfg Config, s Spec) error {
	if err := cfg.Cgroups.Kill(s.Cgroup); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("instance %s is not set up: run `tagout setup --instance %s` first", cfg.Inst.Name(), cfg.Inst.Name())
		}
		return fmt.Errorf("killing the old %s: %w", s.Name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := cfg.Cgroups.WaitEmpty(ctx, s.Cgroup); err != nil {
		return fmt.Errorf("waiting for the old %s to be gone: %w", s.Name, err)
	}
	return nil
}
