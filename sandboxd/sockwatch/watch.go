// Package sockwatch answers for the sockets that no kid may have. A kid's seccomp filter does not refuse them by
// itself but asks here (seccomp_unotify(2)), so that the refusal leaves a record with the process that tried.
//
// It promises that the answer is always an error: there is no code that lets a call go on. What it does not answer,
// the kernel refuses: a call waits for as long as somebody holds the filter's other end, can be killed while it
// waits, and gets ENOSYS as soon as nobody does. So a sandboxd that died leaves kids without these sockets and
// without records of them; a new one is asked by the commands that start after it, and not by those before.
//
// Every call that got an answer is in exactly one record, or in the count of one. A call that a signal takes back
// before its answer is no attempt of its own: the process asks again, or is dead. Nor is a call that the process
// refuses itself, with a seccomp filter of its own: such a filter can only refuse more.
package sockwatch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/tally"
)

// Hook is what the records' field "hook" says. The kernel's counters know nothing of these denials.
const Hook = "seccomp"

// Sessions says whose mark it is.
type Sessions interface {
	SessionOf(mark uint32) (kid, id, card string, ok bool)
}

// Recorder is the audit log. Log must not block.
type Recorder interface{ Log(audit.Record) }

// Metrics is what a Watch reports to.
type Metrics interface {
	Denied(code reason.Code, n uint64)
}

// Config of a Watch. Every field is needed.
type Config struct {
	Path     string // of the unix socket to which runc sends the filters' other ends; its directory exists
	Sessions Sessions
	Audit    Recorder
	Metrics  Metrics
	Log      *slog.Logger
}

const (
	// records a session may cause in a second before they are summed up without what was asked for
	linesPerWindow = 100
	handOver       = 5 * time.Second // for runc to send what it connected for
	mostState      = 64 << 10        // bytes of JSON from runc
)

// Metadata is what runc is to send along with the filters of the session with this mark.
func Metadata(mark uint32) string { return strconv.FormatUint(uint64(mark), 16) }

// Watch takes over the filters' other ends. Make one with New and run it once.
type Watch struct {
	cfg    Config
	listen net.Listener
	tally  *tally.Tally
}

// New listens: from then on runc can start containers that ask. It replaces a dead predecessor's socket.
func New(cfg Config) (*Watch, error) {
	l, err := control.Listen(cfg.Path, 0)
	if err != nil {
		return nil, fmt.Errorf("waiting for the kids' seccomp filters: %w", err)
	}
	return &Watch{cfg: cfg, listen: l, tally: tally.New(cfg.Audit, linesPerWindow)}, nil
}

// Run answers until ctx ends and returns nil then. Any other end is an error: nothing can start in a kid without
// somebody here.
func (w *Watch) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	counted, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { w.tally.Run(counted, tally.Window); close(done) }()
	defer func() { // the last window is written when nobody adds to it any more
		cancel()
		wg.Wait()
		stop()
		<-done
	}()
	context.AfterFunc(ctx, func() { w.listen.Close() }) // ends Accept
	for {
		conn, err := w.listen.Accept()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("waiting for the kids' seccomp filters: %w", err)
		case err != nil: // too many open files, say; it may pass
			w.cfg.Log.Error("taking over a kid's seccomp filter", "error", err)
			pause(ctx, breath)
			continue
		}
		wg.Go(func() { w.serve(ctx, conn.(*net.UnixConn)) })
	}
}

// serve takes over one filter and answers for it until no process has it any more.
func (w *Watch) serve(ctx context.Context, conn *net.UnixConn) {
	mark, file, err := receive(conn)
	if err != nil {
		w.cfg.Log.Error("taking over a kid's seccomp filter; what it asks is refused without a record", "error", err)
		return
	}
	stop := context.AfterFunc(ctx, func() { file.Close() }) // ends waiting
	defer stop()
	defer file.Close() // closing twice is harmless
	if err := w.answer(ctx, mark, file); err != nil && ctx.Err() == nil {
		w.cfg.Log.Error("answering for a kid's seccomp filter; what it asks is refused without a record", "mark", mark, "error", err)
	}
}

// receive reads what runc sends: a container process state (OCI runtime specification, config-linux.md) with the
// filter's other end. It closes conn. The file is the caller's.
func receive(conn *net.UnixConn) (mark uint32, file *os.File, err error) {
	defer conn.Close() // only read
	if err := conn.SetDeadline(time.Now().Add(handOver)); err != nil {
		return 0, nil, err
	}
	buf, oob := make([]byte, mostState), make([]byte, unix.CmsgSpace(4*4))
	n, oobn, _, _, err := conn.ReadMsgUnix(buf, oob)
	if err != nil {
		return 0, nil, fmt.Errorf("reading from runc: %w", err)
	}
	fds, err := rights(oob[:oobn])
	if err != nil {
		return 0, nil, err
	}
	rest, err := io.ReadAll(io.LimitReader(conn, mostState))
	if err == nil {
		mark, err = parse(append(buf[:n], rest...), len(fds))
	}
	if err != nil {
		closeAll(fds)
		return 0, nil, err
	}
	if err := unix.SetNonblock(fds[0], true); err != nil { // so that waiting for it takes no thread
		closeAll(fds)
		return 0, nil, fmt.Errorf("preparing to wait for a filter: %w", err)
	}
	return mark, os.NewFile(uintptr(fds[0]), "seccomp"), nil
}

// parse returns the mark that a container process state is about, where it came with exactly one filter.
func parse(raw []byte, fds int) (uint32, error) {
	var state specs.ContainerProcessState
	if err := json.Unmarshal(raw, &state); err != nil {
		return 0, fmt.Errorf("reading runc's container process state: %w", err)
	}
	if fds != 1 || !slices.Equal(state.Fds, []string{specs.SeccompFdName}) {
		return 0, fmt.Errorf("runc sent %d descriptors, called %q, instead of one filter", fds, state.Fds)
	}
	mark, err := strconv.ParseUint(state.Metadata, 16, 32)
	if err != nil {
		return 0, fmt.Errorf("runc sent a filter of the session %q: %w", state.Metadata, err)
	}
	return uint32(mark), nil
}

// rights takes the descriptors out of a control message (unix(7)). They are the caller's.
func rights(oob []byte) ([]int, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("reading what came with runc's message: %w", err)
	}
	var all []int
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			closeAll(all)
			return nil, fmt.Errorf("reading what came with runc's message: %w", err)
		}
		all = append(all, fds...)
	}
	for _, fd := range all {
		unix.CloseOnExec(fd)
	}
	return all, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
