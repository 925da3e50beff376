package sandboxd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/alert"
	"tagout/internal/auditstream"
	"tagout/internal/cgroup"
	"tagout/internal/config"
	"tagout/internal/control"
	"tagout/internal/fdstore"
	"tagout/internal/instance"
	"tagout/internal/leaks"
	"tagout/internal/lease"
	"tagout/internal/reason"
	"tagout/internal/trip"
	"tagout/sandboxd/api"
	"tagout/sandboxd/auditkeep"
	"tagout/sandboxd/door"
	"tagout/sandboxd/events"
	"tagout/sandboxd/execlog"
	"tagout/sandboxd/filelog"
	"tagout/sandboxd/filewatch"
	"tagout/sandboxd/guard"
	"tagout/sandboxd/image"
	"tagout/sandboxd/kids"
	"tagout/sandboxd/lessons"
	"tagout/sandboxd/once"
	"tagout/sandboxd/runtime"
	"tagout/sandboxd/sockwatch"
)

// Recorder is the audit log. Log must not block.
type Recorder interface {
	kids.Recorder
	Redact(text string) string // as records are written
}

// Kernel is the instance's BPF maps.
type Kernel interface {
	kids.Kernel
	// BeforeForgetting makes Withdraw call fn when nothing can use a session any more, and before what the
	// kernel counted of it goes.
	BeforeForgetting(fn func(mark uint32))
}

// Metrics is everything that sandboxd reports.
type Metrics interface {
	kids.Metrics
	guard.Metrics
	Denied(code reason.Code, n uint64)
	DenialsLost(n uint64)
	execlog.Metrics
	alert.Metrics
	auditstream.Metrics
}

// Config is the daemon's configuration. Every field but Alerts, Streams, Version, Authorities, Trip and API is needed.
type Config struct {
	Inst        instance.Instance
	Trial       func(context.Context) error // runs a container, to see whether any can run here
	Init        string                      // path of kid-init
	Alerts      []alert.Sink                // none: denied attempts are only logged
	Streams     []auditstream.Sink          // who get all records; may be empty
	Version     string                      // Tagout's
	Authorities []config.Authority
	SpawnSigned bool // making a kid takes a signature
	Leases      lease.Terms
	Trip        []trip.Rule      // the box's
	API         config.API       // zero: only over the unix socket
	Served      []netip.AddrPort // where the box's daemons serve over TCP; may be empty
	Budget      kids.Budget
	Keep        *auditkeep.Keeper                           // looks after the audit logs
	Registries  func(private bool) (*http.Transport, error) // reaches those from which images are pulled; also at private addresses
	Kernel      Kernel
	Denials     events.Source
	Starts      execlog.Source
	Audit       Recorder
	Metrics     Metrics
	Log         *slog.Logger
}

// Serve serves mux on the daemon's control socket until ctx ends; healthy says whether the daemon does all
// that it should.
type Serve func(ctx context.Context, mux *http.ServeMux, healthy func() error) error

// keyWait is how long a repeated request waits for the first of its kind.
const keyWait = 20 * time.Second

// Run takes over what a predecessor left and serves until ctx ends. Kids outlive it.
func Run(ctx context.Context, cfg Config, serve Serve) error {
	if os.Geteuid() != 0 {
		return errors.New("starting sandboxd: it makes namespaces and must run as root")
	}
	unlock, err := lock(cfg.Inst)
	if err != nil {
		return fmt.Errorf("starting sandboxd: %w", err)
	}
	defer unlock()
	if err := noteConfig(cfg); err != nil {
		cfg.Log.Error("going on", "error", err)
	}
	watch := filewatch.New(filewatch.Config{File: cfg.Inst.WatchFile(), GID: cfg.Inst.GroupID(), Audit: cfg.Audit, Log: cfg.Log})
	written := filelog.New(filelog.Config{Audit: cfg.Audit, Metrics: cfg.Metrics, Log: cfg.Log})
	learned, err := lessons.Open(cfg.Inst.StateDir(), cfg.Inst.AuditDir())
	if err != nil {
		return fmt.Errorf("starting sandboxd: %w", err)
	}
	making := &buildKids{}
	images, err := newImages(cfg, making)
	if err != nil {
		return fmt.Errorf("starting sandboxd: %w", err)
	}
	manager, err := newManager(cfg, watch, written, images, learned)
	if err != nil {
		return fmt.Errorf("starting sandboxd: %w", err)
	}
	making.manager = manager
	sockets, err := newSocketWatch(cfg, manager)
	if err != nil {
		return fmt.Errorf("starting sandboxd: %w", err)
	}
	follower, err := newFollower(cfg)
	if err != nil {
		return fmt.Errorf("starting sandboxd: %w", err)
	}
	streams, err := newStreams(cfg)
	if err != nil {
		return fmt.Errorf("starting sandboxd: %w", err)
	}
	reader := newReader(cfg, manager)
	programs := execlog.New(execlog.Config{Source: cfg.Starts, Sessions: manager, Audit: cfg.Audit, Metrics: cfg.Metrics, Log: cfg.Log})
	cfg.Kernel.BeforeForgetting(func(mark uint32) { reader.Forget(mark); programs.Forget(mark) })
	if err := manager.Recover(ctx); err != nil {
		cfg.Log.Error("taking over from a predecessor; what is left stays denied and is tried again", "error", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var health health
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { manager.Run(ctx) })
	wg.Go(func() { watch.Run(ctx) })
	wg.Go(func() { written.Run(ctx) })
	wg.Go(func() { newGuard(cfg, manager).Run(ctx) })
	if cfg.Keep != nil {
		wg.Go(func() {
			health.note(cfg.Keep.Run(ctx, keptKids{manager, control.NewClient(cfg.Inst.Socket(instance.Killswitchd))}))
		})
	}
	wg.Go(func() { health.note(cfg.Trial(ctx)) })
	wg.Go(func() { health.note(reader.Run(ctx)) })
	wg.Go(func() { health.note(programs.Run(ctx)) })
	wg.Go(func() { health.note(sockets.Run(ctx)) })
	wg.Go(func() { health.note(follower.Run(ctx)) })
	wg.Go(func() { health.note(streams.Run(ctx)) })
	keys, err := once.Open(once.Config{Dir: cfg.Inst.KeyDir(), Wait: keyWait})
	if err != nil {
		return fmt.Errorf("starting sandboxd: %w", err)
	}
	orders := newOrders(cfg)
	wg.Go(func() { orders.Run(ctx) })
	routes := api.New(api.Config{
		Kids: manager, Plan: planner(cfg.Served), PlanEgress: EgressFromCard, Images: images, Orders: orders, Lessons: learned, Keys: keys, Log: cfg.Log, Audit: cfg.Audit, Logs: cfg.Inst.AuditDir(), Ending: ctx.Done(),
	})
	if cfg.API.Listen.IsValid() {
		d, err := door.Open(ctx, doorConfig(cfg, routes))
		if err != nil {
			return fmt.Errorf("starting sandboxd: %w", err)
		}
		wg.Go(func() { health.note(d.Run(ctx)) })
	}
	mux := http.NewServeMux()
	api.Register(mux, routes)
	wg.Go(func() { routes.Run(ctx) })
	api.RegisterProofs(mux, api.ProofConfig{
		Proofs: manager, Killswitchd: cfg.Inst.UID(instance.Killswitchd), Ending: ctx.Done(),
		Plan: func() (kids.Plan, error) { return proofPlan(cfg.Inst.Gateway().String()) },
	})
	return serve(ctx, mux, health.err)
}

// lock makes this the instance's only sandboxd: a second one would take the first one's half-made kids for
// leftovers. The kernel drops the lock when the process ends, however it ends.
func lock(inst instance.Instance) (unlock func(), err error) {
	dir := filepath.Join(inst.StateDir(), instance.Sandboxd)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making sandboxd's directory: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close() // nothing was written
		return nil, fmt.Errorf("instance %s has a sandboxd already: stop that one first: %w", inst.Name(), err)
	}
	return func() { f.Close() }, nil // nothing was written
}

func newManager(cfg Config, watch *filewatch.Watch, written *filelog.Watch, images *imageSet, learned *lessons.Store) (*kids.Manager, error) {
	layout, err := cgroup.Detect()
	if err != nil {
		return nil, err
	}
	runc, err := runtime.NewRunc(cfg.Inst.RuncRoot())
	if err != nil {
		return nil, err
	}
	if err := layout.Create(cfg.Inst.StoreCgroupRel()); err != nil {
		return nil, err
	}
	keys, err := leaks.New()
	if err != nil {
		return nil, err
	}
	stopper, points, credentials := clients(cfg.Inst)
	var room func() error
	if cfg.Keep != nil {
		room = cfg.Keep.Room
	}
	return kids.New(kids.Config{
		Room: room,
		Inst: cfg.Inst, Init: cfg.Init, Runtime: runc, Images: map[string]kids.Image{image.HostName: images.host},
		Stored:   images.get,
		Writable: images.writable, SocketWatch: socketWatchPath(cfg.Inst), Kept: newStore(cfg, layout), Cgroups: layout, Kernel: cfg.Kernel, Stopper: stopper, Points: points, Credentials: credentials,
		Trip: cfg.Trip, Budget: cfg.Budget, Files: watch, FileLog: written, Redact: cfg.Audit.Redact, Lessons: learned, Keys: keys, Audit: cfg.Audit, Metrics: cfg.Metrics, Log: cfg.Log,
	})
}

// newStore returns the client of the store that keeps what commands need to outlive sandboxd. The store is started when
// there is something to keep.
func newStore(cfg Config, layout cgroup.Layout) *fdstore.Client {
	return fdstore.NewClient(fdstore.Config{
		Socket: cfg.Inst.StoreSocket(), Program: []string{cfg.Init, "store", "--instance", cfg.Inst.Name()},
		Place: func(pid int) error { return cgroup.Join(layout.V2(cfg.Inst.StoreCgroupRel()), pid) },
	})
}

func newReader(cfg Config, manager *kids.Manager) *events.Reader {
	return events.New(events.Config{
		Cursor: filepath.Join(cfg.Inst.StateDir(), instance.Sandboxd, "lost-denials"),
		Told:   cfg.Inst.AuditFile(instance.Sandboxd),
		Source: cfg.Denials, Sessions: manager, Audit: cfg.Audit, Metrics: cfg.Metrics, Log: cfg.Log,
	})
}

// socketWatchPath is beside the control socket, in a directory of sandboxd's.
func socketWatchPath(inst instance.Instance) string {
	return filepath.Join(filepath.Dir(inst.Socket(instance.Sandboxd)), "seccomp.sock")
}

func newGuard(cfg Config, manager *kids.Manager) *guard.Guard {
	client := killswitchd{control.NewClient(cfg.Inst.Socket(instance.Killswitchd))}
	return guard.New(guard.Config{
		Checks: checks(cfg.Inst, cfg.Audit), Renew: client.renew, Kids: manager,
		Term: cfg.Leases.Kids, Absent: cfg.Leases.Absent, Metrics: cfg.Metrics, Log: cfg.Log,
	})
}

func newSocketWatch(cfg Config, manager *kids.Manager) (*sockwatch.Watch, error) {
	return sockwatch.New(sockwatch.Config{
		Path: socketWatchPath(cfg.Inst), Sessions: manager, Audit: cfg.Audit, Metrics: cfg.Metrics, Log: cfg.Log,
	})
}

func newFollower(cfg Config) (*alert.Follower, error) {
	return alert.New(alert.Config{
		Dir: cfg.Inst.AuditDir(), Sinks: cfg.Alerts, Log: cfg.Log, Audit: cfg.Audit, Metrics: cfg.Metrics,
		Cursor: filepath.Join(cfg.Inst.StateDir(), instance.Sandboxd, "alerts.json"),
	})
}

func newStreams(cfg Config) (*auditstream.Streams, error) {
	return auditstream.New(auditstream.Config{
		Dir: cfg.Inst.AuditDir(), State: filepath.Join(cfg.Inst.StateDir(), instance.Sandboxd), Sinks: cfg.Streams, Version: cfg.Version,
		Log: cfg.Log, Audit: cfg.Audit, Metrics: cfg.Metrics,
	})
}

// health is the first error of a part that should run for as long as the daemon does.
type health struct{ first atomic.Pointer[error] }

func (h *health) note(err error) {
	if err != nil {
		h.first.CompareAndSwap(nil, &err)
	}
}

func (h *health) err() error {
	if p := h.first.Load(); p != nil {
		return *p
	}
	return nil
}
