// Package daemon is what the mains of the daemons share: one flag, the instance, a JSON log, the audit log,
// metrics, signals and the control socket. It decides nothing.
package daemon

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/config"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/metrics"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// Exit codes of every daemon.
const (
	ExitOK      = 0
	ExitFailure = 1
	ExitUsage   = 2
)

// grace is how long requests under way may take to finish once the daemon was told to end.
const grace = 2 * time.Second

// Daemon is what a main's run function gets. The fields are never nil, except Box in killswitchd, which must
// stop kids also where the configuration cannot be read.
type Daemon struct {
	Name    string
	Inst    instance.Instance
	Log     *slog.Logger
	Audit   *audit.Logger
	Metrics *metrics.Registry
	Box     *config.Box
	Warning func() error // what is wrong although the daemon serves; a main sets it before Serve, or leaves it nil
}

// Main runs a daemon and exits the process. run returns nil once ctx has ended (SIGTERM or SIGINT) and
// everything is closed; any other return is a failure, printed as one line.
func Main(name string, run func(ctx context.Context, d *Daemon) error) {
	os.Exit(start(name, os.Args[1:], os.Stderr, run))
}

func start(name string, args []string, stderr io.Writer, run func(ctx context.Context, d *Daemon) error) int {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(stderr)
	instName := flags.String("instance", instance.DefaultName, "name of the Tagout instance")
	if err := flags.Parse(args); err != nil || flags.NArg() > 0 {
		if errors.Is(err, flag.ErrHelp) {
			return ExitOK
		}
		if err == nil {
			fmt.Fprintf(stderr, "%s: unexpected argument %q: see %s -help\n", name, flags.Arg(0), name)
		}
		return ExitUsage
	}
	ctx, cancel := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer cancel()
	d, err := open(name, *instName, stderr)
	if err == nil {
		err = d.run(ctx, run)
	}
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", name, err)
		return ExitFailure
	}
	return ExitOK
}

// mustStart says whether the daemon starts whatever is missing: killswitchd stops kids with the disk full, the
// configuration gone and its metrics port taken.
func mustStart(name string) bool { return name == instance.Killswitchd }

// open prepares the process and everything that run gets.
func open(name, instName string, stderr io.Writer) (*Daemon, error) {
	if err := noNewPrivs(); err != nil {
		return nil, fmt.Errorf("setting no_new_privs: %w", err)
	}
	unix.Umask(0o027)
	inst, err := instance.Open(instName)
	if err != nil {
		return nil, err
	}
	d := &Daemon{
		Name: name, Inst: inst, Metrics: metrics.NewRegistry(instName, name),
		Log: slog.New(slog.NewJSONHandler(stderr, nil)).With("daemon", name, "instance", instName),
	}
	d.Box, err = config.Load(inst.BoxConfig())
	if err != nil && !mustStart(name) {
		return nil, err
	}
	if mustStart(name) {
		if err != nil {
			d.Log.Error("going on without the box's configuration", "error", err)
		}
		d.Audit = audit.OpenLate(inst.AuditFile(name), instName, name)
		d.completeRecords()
		return d, nil
	}
	if d.Audit, err = audit.Open(inst.AuditFile(name), instName, name); err != nil {
		return d, err
	}
	d.completeRecords()
	return d, nil
}

// noNewPrivs sets the flag on every thread: it belongs to a thread, and the runtime has several by now
// (prctl(2)). A build with cgo, as the race detector needs, can only set it on this thread and its children;
// what we ship is built without.
func noNewPrivs() error {
	_, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0)
	if errors.Is(errno, unix.ENOTSUP) {
		return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	}
	if errno != 0 {
		return errno
	}
	return nil
}

func (d *Daemon) run(ctx context.Context, run func(ctx context.Context, d *Daemon) error) error {
	d.Metrics.AuditLog(func() (records, bytes, lost, syncs uint64) {
		st := d.Audit.Stats()
		return st.Records, st.Bytes, st.Lost, st.Syncs
	})
	d.Audit.Log(audit.Record{Event: audit.EventDaemonStarted, Outcome: audit.OutcomeOK, Process: &audit.Process{PID: os.Getpid()}, Fields: d.config()})
	err := run(ctx, d)
	rec := audit.Record{Event: audit.EventDaemonStopped, Outcome: audit.OutcomeOK}
	if err != nil {
		rec.Outcome, rec.Detail = audit.OutcomeFail, err.Error()
	}
	d.Audit.Log(rec)
	return errors.Join(err, d.Audit.Close())
}

// Serve serves mux on the daemon's control socket, with /healthz (200 while healthy returns nil) and
// /metrics added, until ctx ends. Where the box's configuration names a TCP address for the daemon's
// metrics, they are served there as well. It tells systemd when it is ready.
func (d *Daemon) Serve(ctx context.Context, mux *http.ServeMux, healthy func() error) error {
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if err := healthy(); err != nil {
			control.Refuse(w, http.StatusServiceUnavailable, reason.OK, err.Error())
			return
		}
		health := wire.Health{Status: "ok"}
		if err := d.Audit.Err(); err != nil { // the daemon does what it should, and the operator should know
			health.Warning = err.Error()
		} else if d.Warning != nil {
			if err := d.Warning(); err != nil {
				health.Warning = err.Error()
			}
		}
		control.Reply(w, health)
	})
	mux.Handle("GET /metrics", d.Metrics.Handler())
	l, err := control.Listen(d.Inst.Socket(d.Name), d.Inst.GroupID())
	if err != nil {
		return err
	}
	stopMetrics, err := d.serveMetrics(ctx)
	if err != nil && mustStart(d.Name) {
		d.Log.Error("going on without metrics over TCP", "error", err)
		stopMetrics, err = func() {}, nil
	}
	if err != nil {
		l.Close() // already failing
		return err
	}
	defer stopMetrics()
	if _, err := daemon.SdNotify(false, daemon.SdNotifyReady); err != nil {
		d.Log.Warn("telling systemd that we are ready", "error", err)
	}
	d.Log.Info("serving", "socket", l.Addr().String())
	return control.Serve(ctx, l, mux, grace)
}

// serveMetrics serves /metrics alone on the TCP address that the configuration gives, if any.
func (d *Daemon) serveMetrics(ctx context.Context) (stop func(), err error) {
	if d.Box == nil || d.Box.MetricsListen[d.Name] == "" {
		return func() {}, nil
	}
	addr := d.Box.MetricsListen[d.Name]
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("serving metrics on %s: change metricsListen in the box's configuration, or free the port: %w", addr, err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", d.Metrics.Handler())
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go srv.Serve(l)                    // ends with Close
	return func() { srv.Close() }, nil // nothing is written through it
}
