package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// users use tokens at a steady pace, whatever each use takes.
type users struct {
	stop context.CancelFunc
	done sync.WaitGroup

	mu   sync.Mutex
	took []time.Duration // guarded by mu: of the accepted ones
	last time.Time       // guarded by mu: start of the last accepted one
	err  error           // guarded by mu: why the first refused one was
}

// usersAtOnce is how many uses may be under way; a use that finds no room is late, and its time counts from when it was due.
const usersAtOnce = 8

func newUsers(ctx context.Context, rate int, use func() error) *users {
	ctx, stop := context.WithCancel(ctx)
	u := &users{stop: stop}
	due := make(chan time.Time, rate) // a second's worth may be late
	u.done.Go(func() {
		defer close(due)
		next := time.Now()
		for ctx.Err() == nil {
			next = next.Add(time.Second / time.Duration(rate))
			pause(ctx, time.Until(next))
			select {
			case due <- next:
			default: // a use that is more than a second late is none
			}
		}
	})
	for range usersAtOnce {
		u.done.Go(func() {
			for at := range due {
				if ctx.Err() == nil {
					began := time.Now()
					u.note(at, began, use())
				}
			}
		})
	}
	return u
}

func pause(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

func (u *users) note(due, began time.Time, err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if err != nil {
		if u.err == nil {
			u.err = err
		}
		return
	}
	u.took = append(u.took, time.Since(due))
	if began.After(u.last) {
		u.last = began
	}
}

// started waits until uses are accepted.
func (u *users) started() error {
	deadline := time.Now().Add(10 * time.Second)
	for {
		u.mu.Lock()
		n, err := len(u.took), u.err
		u.mu.Unlock()
		switch {
		case err != nil:
			return fmt.Errorf("using a token: %w", err)
		case n >= 20:
			return nil
		case time.Now().After(deadline):
			return errors.New("no token could be used within 10 s")
		}
		time.Sleep(time.Millisecond)
	}
}

// end stops the uses and returns when the last that was accepted began.
func (u *users) end() time.Time {
	u.stop()
	u.done.Wait()
	return u.last
}

// underUse calls do n times, while tokens are used at the rate, and returns what each took.
func underUse(ctx context.Context, rate, n int, use func() error, do func(i int) error) (took, uses []time.Duration, err error) {
	u := newUsers(ctx, rate, use)
	defer u.end()
	if err := u.started(); err != nil {
		return nil, nil, err
	}
	for i := range n {
		began := time.Now()
		if err := do(i); err != nil {
			return nil, nil, err
		}
		took = append(took, time.Since(began))
		pause(ctx, 3*time.Millisecond) // the pace of the revocations
	}
	u.end()
	if u.err != nil {
		return nil, nil, fmt.Errorf("using a token: %w", u.err)
	}
	return took, u.took, nil
}

// use returns what uses one of the tokens at random, as the proxy does.
func (r *credentials) use(tokens []string) func() error {
	marks := r.marks[len(r.marks)-len(tokens):]
	client := control.NewClientOver(&http.Transport{MaxIdleConnsPerHost: usersAtOnce, DialContext: func(context.Context, string, string) (net.Conn, error) {
		return dialAs(r.Inst.Socket(instance.Credd), r.Inst.UID(instance.Proxy), r.Inst.GroupID())
	}})
	return func() error {
		i := rand.IntN(len(tokens))
		return client.Call(context.Background(), http.MethodPost, "/v1/resolve",
			wire.ResolveRequest{Mark: marks[i], Token: tokens[i], Host: benchHost, Port: 443, Method: http.MethodGet, Path: "/v1/whoami",
				Place: wire.Presentation{As: wire.AsHeader, Name: "Authorization"}}, nil)
	}
}

// dialAs connects to the unix socket as another user: the kernel notes the credentials of the thread that connects.
func dialAs(socket string, uid, gid int) (net.Conn, error) {
	t := newThread()
	defer t.close()
	var fd int
	err := t.do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(gid), uintptr(gid), uintptr(gid)); e != 0 {
			return e
		}
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); e != 0 {
			return e
		}
		return unix.Connect(fd, &unix.SockaddrUnix{Name: socket})
	})
	if err != nil {
		return nil, fmt.Errorf("connecting to %s as uid %d: %w", socket, uid, err)
	}
	f := os.NewFile(uintptr(fd), socket)
	defer f.Close() // FileConn has its own copy
	return net.FileConn(f)
}

// settled returns credd's resident memory once it does not fall any more: a burst of requests leaves garbage.
func (r *credentials) settled(ctx context.Context) (float64, error) {
	const looks, between = 8, 400 * time.Millisecond // credd looks each second whether a burst is over
	least, same := 0.0, 0
	for range 100 {
		now, err := r.creddMemory()
		if err != nil {
			return 0, err
		}
		if least == 0 || now < least-0.1 {
			least, same = now, 0
		} else if same++; same >= looks {
			return least, nil
		}
		pause(ctx, between)
	}
	return least, ctx.Err()
}

// creddMemory returns credd's resident memory in MB.
func (r *credentials) creddMemory() (float64, error) {
	layout, err := cgroup.Detect()
	if err != nil {
		return 0, err
	}
	pids, err := cgroup.Procs(layout.V2(r.Inst.DaemonCgroupRel(instance.Credd)))
	if err != nil {
		return 0, err
	}
	if len(pids) == 0 {
		return 0, errors.New("credd has no process: is it running?")
	}
	return resident(pids...)
}
