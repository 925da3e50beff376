package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"tagout/internal/instance"
)

const peerRedis = "redis, appendonly everysec, unix socket"

// redis is a Redis that holds what is valid, as many services keep it: GET at every use, DEL to revoke. Like credd it
// writes down after it answers.
type redis struct {
	cmd    *exec.Cmd
	starts *thread // its parent, for the parent-death signal
	socket string
	remove func()

	mu   sync.Mutex
	idle []*redisConn // guarded by mu
}

// newRedis starts one on a socket of its own; nil where it is not installed.
func newRedis(ctx context.Context, inst instance.Instance) (*redis, error) {
	program, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, nil
	}
	dir, remove, err := scratch(inst)
	if err != nil {
		return nil, err
	}
	r := &redis{socket: filepath.Join(dir, "s"), remove: remove, starts: newThread()}
	r.cmd = exec.CommandContext(ctx, program, "--port", "0", "--unixsocket", r.socket, "--save", "", "--appendonly", "yes", "--appendfsync", "everysec", "--dir", dir)
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := r.starts.do(r.cmd.Start); err != nil {
		return nil, errors.Join(err, r.close())
	}
	deadline := time.Now().Add(10 * time.Second)
	for err = r.call("PING"); err != nil; err = r.call("PING") {
		if time.Now().After(deadline) {
			return nil, errors.Join(err, r.close())
		}
		time.Sleep(10 * time.Millisecond)
	}
	return r, nil
}

func (r *redis) close() error {
	for _, c := range r.idle {
		c.Close() // nothing is lost
	}
	if r.cmd.Process != nil {
		r.cmd.Process.Kill() // may be dead already
		r.cmd.Wait()         // killed
	}
	r.starts.close()
	r.remove()
	return nil
}

// memory returns its resident memory in MB.
func (r *redis) memory() (float64, error) { return resident(r.cmd.Process.Pid) }

// fill stores the tokens, each with what a session's entry says.
func (r *redis) fill(tokens []string) error {
	for i, token := range tokens {
		if err := r.call("SET", token, fmt.Sprintf(`{"kid":"bench-%d","session":"01BENCH%d","card":"bench","mark":%d,"secret":"vendor_api"}`, i, i, i)); err != nil {
			return err
		}
	}
	return nil
}

// uses returns what looks one of the tokens up at random.
func (r *redis) uses(tokens []string) func() error {
	return func() error { return r.call("GET", tokens[rand.IntN(len(tokens))]) }
}

// call sends one command and waits for its answer, which must not be an error or nothing.
func (r *redis) call(words ...string) error {
	c, err := r.take()
	if err != nil {
		return err
	}
	if err := c.call(words); err != nil {
		c.Close() // already failing
		return fmt.Errorf("redis: %s: %w", words[0], err)
	}
	r.mu.Lock()
	r.idle = append(r.idle, c)
	r.mu.Unlock()
	return nil
}

func (r *redis) take() (*redisConn, error) {
	r.mu.Lock()
	if n := len(r.idle); n > 0 {
		c := r.idle[n-1]
		r.idle = r.idle[:n-1]
		r.mu.Unlock()
		return c, nil
	}
	r.mu.Unlock()
	nc, err := net.Dial("unix", r.socket)
	if err != nil {
		return nil, err
	}
	return &redisConn{nc, bufio.NewReader(nc)}, nil
}

// redisConn speaks RESP2, as much of it as is needed.
type redisConn struct {
	net.Conn
	br *bufio.Reader
}

func (c *redisConn) call(words []string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "*%d\r\n", len(words))
	for _, w := range words {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(w), w)
	}
	if _, err := c.Write([]byte(b.String())); err != nil {
		return err
	}
	line, err := c.br.ReadString('\n')
	if err != nil {
		return err
	}
	switch line = strings.TrimSpace(line); {
	case strings.HasPrefix(line, "+"), strings.HasPrefix(line, ":") && line != ":0":
		return nil
	case strings.HasPrefix(line, "$"):
		n, err := strconv.Atoi(line[1:])
		if err != nil || n < 0 {
			return errors.New("nothing is there")
		}
		_, err = c.br.Discard(n + 2)
		return err
	}
	return errors.New(line)
}
