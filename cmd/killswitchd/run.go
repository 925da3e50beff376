package main

import (
	"context"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/authority"
	"tagout/internal/cgroup"
	"tagout/internal/daemon"
	"tagout/internal/instance"
	"tagout/internal/lease"
	"tagout/internal/session"
	"tagout/internal/wire"
	"tagout/killswitch"
)

// sentinelName is the file in the instance's run directory whose existence stops everything.
const sentinelName = "STOP"

// drain is how long stops under way may take to report once the daemon was told to end. What they have not
// finished, the next start does.
const drain = 3 * time.Second

// run wires the switch and serves it. Nothing here needs the box's configuration, and a missing BPF filesystem
// or a dead credd keeps no layer from firing that does not need it.
func run(ctx context.Context, d *daemon.Daemon) error {
	if err := harden(d.Log); err != nil {
		return err
	}
	layout, err := cgroup.Detect()
	if err != nil {
		return err
	}
	net := newNetwork(d.Inst.PinDir(), d.Log)
	defer net.close()
	terms, err := lease.Load(d.Inst)
	if err != nil {
		d.Log.Error("going on with the default leases", "error", err)
	}
	shown := d.Metrics.Killswitch()
	sw := killswitch.New(config(d, layout, net, terms, shown))
	shown.Show(lamps(sw))
	mux := http.NewServeMux()
	sw.Routes(mux)

	life, end := context.WithCancel(ctx)
	defer end()
	enforced := make(chan error, 1)
	go func() { enforced <- sw.Run(life) }()
	go net.keepOpen(life)
	go trips(d, layout, net, sw).Run(life)
	go feedWatchdog(life, d.Log, sw.Ticks)
	go collectWhenIdle(life, sw.Idle)
	stopSignals(life, d, sw)
	serveErr := d.Serve(ctx, mux, sw.Healthy)

	end()
	err = <-enforced
	wait, cancel := context.WithTimeout(context.Background(), drain)
	defer cancel()
	sw.Wait(wait)
	if serveErr != nil {
		return serveErr
	}
	return err
}

func config(d *daemon.Daemon, layout cgroup.Layout, net *network, terms lease.Terms, shown killswitch.Metrics) killswitch.Config {
	return killswitch.Config{
		Sessions:    session.NewStore(d.Inst.SessionDir()),
		Cgroups:     killswitch.OSCgroups{},
		Network:     net,
		Leases:      net,
		Sockets:     killswitch.NetlinkSockets{},
		Credentials: killswitch.NewCredd(d.Inst.Socket(instance.Credd)),
		Authorities: authority.NewBook(d.Inst.AuthorityFile(), 0),
		Used:        usedOrders(d),
		Tags:        killswitch.NewTagFiles(d.Inst.TagDir(), d.Inst.StopDir()),
		Audit:       d.Audit,
		Metrics:     shown,
		Log:         d.Log,
		KidsDir:     layout.V2(d.Inst.KidsCgroupRel()),
		KidsFreezer: layout.Freezer(d.Inst.KidsCgroupRel()),
		CreddDir:    layout.V2(d.Inst.DaemonCgroupRel(instance.Credd)),
		Sentinel:    filepath.Join(d.Inst.RunDir(), sentinelName),
		UID:         os.Getuid(),
		GID:         d.Inst.GroupID(),
		Around:      around(d, layout, net),
		Proof:       proofs(d, net),
		Timing:      killswitch.Timing{KernelLease: terms.Kernel, KidLease: terms.Kids},
	}
}

// around is what a stop looks at to tell of it, and does without.
func around(d *daemon.Daemon, layout cgroup.Layout, net *network) killswitch.Around {
	a := killswitch.Around{Daemons: map[string]string{}, Audit: d.Audit.Err, Maps: net.lost}
	for _, name := range instance.Daemons() {
		if name != d.Name {
			a.Daemons[name] = layout.V2(d.Inst.DaemonCgroupRel(name))
		}
	}
	return a
}

// usedOrders opens the memory of signed orders. Without it releases are refused and stops are not.
func usedOrders(d *daemon.Daemon) *authority.Used {
	u, err := authority.OpenUsed(d.Inst.OrderDir(), time.Now())
	if err != nil {
		d.Log.Error("reading which orders were used: signed releases are refused: run `tagout setup` again", "error", err)
	}
	return u
}

// stopSignals makes SIGUSR1 stop everything: it works where no socket does. Only root and this daemon's own
// user can send it.
func stopSignals(ctx context.Context, d *daemon.Daemon, sw *killswitch.Switch) {
	usr1 := make(chan os.Signal, 1)
	signal.Notify(usr1, unix.SIGUSR1)
	go func() {
		defer signal.Stop(usr1)
		for {
			select {
			case <-ctx.Done():
				return
			case <-usr1:
				o := killswitch.Order{Received: time.Now(), StopRequest: wire.StopRequest{
					Scope: wire.Scope{All: true}, By: "uid:0", Reason: "SIGUSR1 was sent to killswitchd", Cause: killswitch.CauseSignal,
				}}
				if _, err := sw.Stop(o); err != nil {
					d.Log.Error("stopping because of a signal", "error", err)
				}
			}
		}
	}()
}
