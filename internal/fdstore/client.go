package fdstore

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	answerTime = 2 * time.Second // a store may take to answer
	restTime   = 10 * answerTime // one that did not is left alone for so long
)

// Config is a client's configuration. All of it is needed.
type Config struct {
	Socket  string   // path of the store's socket, in a directory that is root's alone to write to
	Program []string // starts a store that listens on ListenFD; an absolute path first
	// Place takes a store that was just started out of reach of what ends its client.
	Place func(pid int) error
}

// Client talks to the store at its socket. Safe for concurrent use; one request is under way at a time.
type Client struct {
	cfg Config

	mu   sync.Mutex
	conn int       // guarded by mu; negative: there is none
	hung time.Time // guarded by mu; when it did not answer last
}

// NewClient returns a client. It does nothing yet.
func NewClient(cfg Config) *Client { return &Client{cfg: cfg, conn: -1} }

// Put makes the store keep copies of the descriptors under id, MaxFiles at most, in the place of others that were kept
// there. It starts a store where there is none.
func (c *Client) Put(id string, files []int) error {
	if !goodID(id) || len(files) == 0 || len(files) > MaxFiles {
		return fmt.Errorf("keeping descriptors: %q with %d of them", id, len(files))
	}
	if _, _, err := c.ask(opPut, id, files, true); err != nil {
		return fmt.Errorf("keeping descriptors for %s: %w", id, err)
	}
	return nil
}

// Get returns copies of what is kept under id, in their order. They are the caller's to close. errors.Is(err,
// ErrNotKept) where there are none.
func (c *Client) Get(id string) ([]int, error) {
	_, files, err := c.ask(opGet, id, nil, false)
	if err != nil {
		return nil, fmt.Errorf("taking the descriptors of %s: %w", id, err)
	}
	return files, nil
}

// Drop makes the store forget id. One that is not kept is no error.
func (c *Client) Drop(id string) error {
	if _, _, err := c.ask(opDrop, id, nil, false); err != nil && !errors.Is(err, ErrNotKept) {
		return fmt.Errorf("forgetting the descriptors of %s: %w", id, err)
	}
	return nil
}

// List returns all ids.
func (c *Client) List() ([]string, error) {
	answer, _, err := c.ask(opList, "", nil, false)
	if errors.Is(err, ErrNotKept) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("asking which descriptors are kept: %w", err)
	}
	return strings.Fields(string(answer)), nil
}

// Close ends the connection. A store that keeps nothing ends by that.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hangUp()
}

func (c *Client) hangUp() {
	if c.conn >= 0 {
		unix.Close(c.conn) // nothing is under way
		c.conn = -1
	}
}

// ask sends a request and returns the answer to it. A store that has died since the last one is looked for anew.
func (c *Client) ask(op byte, id string, files []int, start bool) (answer []byte, got []int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.hung) < restTime {
		return nil, nil, errors.New("the store of descriptors did not answer a moment ago")
	}
	answer, got, again, err := c.try(op, id, files, start)
	if again {
		answer, got, _, err = c.try(op, id, files, start)
	}
	if errors.Is(err, unix.EAGAIN) {
		c.hung = time.Now()
		err = fmt.Errorf("the store of descriptors does not answer: %w", err)
	}
	if err != nil {
		return nil, nil, err
	}
	if errno := unix.Errno(answer[0]); errno != 0 {
		closeAll(got)
		if errno == unix.ENOENT {
			return nil, nil, ErrNotKept
		}
		return nil, nil, errno
	}
	return answer[1:], got, nil
}

// try is one attempt; again says that another store may be there by now.
func (c *Client) try(op byte, id string, files []int, start bool) (answer []byte, got []int, again bool, err error) {
	fresh := c.conn < 0
	if fresh {
		if err := c.connect(start); err != nil {
			return nil, nil, false, err
		}
	}
	answer, got, err = c.exchange(op, id, files)
	if err != nil {
		c.hangUp()
	}
	return answer, got, err != nil && !fresh && !errors.Is(err, unix.EAGAIN), err
}

func (c *Client) exchange(op byte, id string, files []int) ([]byte, []int, error) {
	if err := send(c.conn, append([]byte{op}, id...), files, 0); err != nil {
		return nil, nil, err
	}
	buf := make([]byte, 1)
	if op == opList {
		buf = make([]byte, maxAnswer)
	}
	n, got, err := receive(c.conn, buf, 0)
	if err == nil && n == 0 {
		err = errors.New("the store has ended")
	}
	return buf[:n], got, err
}

// connect finds the store, or starts one.
func (c *Client) connect(start bool) error {
	err := c.dial()
	if err == nil {
		return nil
	}
	if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("connecting to the store of descriptors: %w", err)
	}
	if !start {
		return ErrNotKept
	}
	if err := c.start(); err != nil {
		return fmt.Errorf("starting a store of descriptors: %w", err)
	}
	if err := c.dial(); err != nil {
		return fmt.Errorf("connecting to the store of descriptors: %w", err)
	}
	return nil
}

func (c *Client) dial() error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	limit := unix.NsecToTimeval(answerTime.Nanoseconds())
	err = errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit), unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit))
	for try := err == nil; try; try = errors.Is(err, unix.EINTR) {
		err = unix.Connect(fd, &unix.SockaddrUnix{Name: c.cfg.Socket})
	}
	if err != nil {
		unix.Close(fd) // nothing was sent
		return err
	}
	c.conn = fd
	return nil
}

// start starts a store. Its socket listens before it runs.
func (c *Client) start() error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	listener := os.NewFile(uintptr(fd), "listener")
	defer listener.Close() // the store has its own
	if err := os.Remove(c.cfg.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: c.cfg.Socket}), unix.Chmod(c.cfg.Socket, 0o600), unix.Listen(fd, maxConns)); err != nil {
		return err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close() // as above
	p, err := os.StartProcess(c.cfg.Program[0], c.cfg.Program, &os.ProcAttr{
		Dir: "/", Env: []string{}, Files: []*os.File{null, null, null, listener}, Sys: &unix.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return err
	}
	if err := c.cfg.Place(p.Pid); err != nil {
		p.Kill() // it may be gone
		p.Wait() // it was killed
		return err
	}
	go p.Wait() // a store that ends while this process lives must not stay a zombie
	return nil
}
