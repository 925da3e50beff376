package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// What the server is asked to do, once it has answered the ClientHello.
const (
	askPour = 'p' // then 8 bytes, big endian: the length of a piece; the server answers each piece with a byte
	askEcho = 'e' // every byte comes back
	askEnd  = 'o' // the server ends the tunnel
)

// answerLen is how long the server's answer to a ClientHello is: one TLS record with an alert.
const answerLen = 7

const dialLimit = 5 * time.Second

// road is how to open tunnels: the address and what is said first are worked out once.
type road struct {
	addr    *net.TCPAddr
	connect []byte
	hello   []byte
}

func newRoad(o options) (*road, error) {
	addr, err := net.ResolveTCPAddr("tcp4", o.to)
	if err != nil {
		return nil, err
	}
	r := &road{addr: addr}
	if o.connect != "" {
		r.connect = fmt.Appendf(nil, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", o.connect, o.connect)
	}
	r.hello, err = clientHello(o.sni)
	return r, err
}

// captured is a net.Conn that keeps the first write and then fails.
type captured struct {
	net.Conn
	first []byte
}

var errCaptured = errors.New("captured")

func (c *captured) Write(p []byte) (int, error) {
	c.first = append(c.first, p...)
	return 0, errCaptured
}

func clientHello(name string) ([]byte, error) {
	var c captured
	err := tls.Client(&c, &tls.Config{ServerName: name}).HandshakeContext(context.Background())
	if !errors.Is(err, errCaptured) {
		return nil, fmt.Errorf("making a ClientHello: %w", err)
	}
	return c.first, nil
}

// dial connects, and asks the proxy for the server where there is one to ask.
func (r *road) dial() (*net.TCPConn, error) {
	c, err := net.DialTCP("tcp4", nil, r.addr)
	if err != nil {
		return nil, err
	}
	if r.connect == nil {
		return c, nil
	}
	c.SetDeadline(time.Now().Add(dialLimit))
	if _, err = c.Write(r.connect); err == nil {
		err = established(c)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	c.SetDeadline(time.Time{})
	return c, nil
}

// established reads the answer to a CONNECT. The server never speaks first, so nothing follows it.
func established(c *net.TCPConn) error {
	var head [1024]byte
	n := 0
	for !bytes.HasSuffix(head[:n], []byte("\r\n\r\n")) {
		k, err := c.Read(head[n:])
		n += k
		if err != nil {
			return fmt.Errorf("after %q: %w", head[:n], err)
		}
	}
	if !bytes.Contains(head[:min(n, 16)], []byte(" 200")) {
		return fmt.Errorf("the proxy answered %q", head[:n])
	}
	return nil
}

// tunnel opens a tunnel, which stands when the server has answered the ClientHello, and asks for something.
func (r *road) tunnel(ask ...byte) (*net.TCPConn, error) {
	c, err := r.dial()
	if err != nil {
		return nil, err
	}
	c.SetDeadline(time.Now().Add(dialLimit))
	var answer [answerLen]byte
	if _, err = c.Write(r.hello); err == nil {
		_, err = io.ReadFull(c, answer[:])
	}
	if err == nil && len(ask) > 0 {
		_, err = c.Write(ask)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, c.SetDeadline(time.Time{})
}

func pour(o options) (Result, error) {
	r, err := newRoad(o)
	if err != nil {
		return Result{}, err
	}
	c, err := r.tunnel(binary.BigEndian.AppendUint64([]byte{askPour}, uint64(o.piece))...)
	if err != nil {
		return Result{}, err
	}
	defer c.Close()
	block := make([]byte, 256<<10)
	var res Result
	start := time.Now()
	for time.Since(start) < o.during {
		for left := o.piece; left > 0; {
			n, err := c.Write(block[:min(left, int64(len(block)))])
			if err != nil {
				return res, err
			}
			left -= int64(n)
		}
		if _, err := io.ReadFull(c, block[:1]); err != nil {
			return res, fmt.Errorf("reading an acknowledgement: %w", err)
		}
		res.Count++
		res.Bytes += o.piece
	}
	res.Seconds = time.Since(start).Seconds()
	return res, nil
}

func ping(o options) (Result, error) {
	r, err := newRoad(o)
	if err != nil {
		return Result{}, err
	}
	c, err := r.tunnel(askEcho)
	if err != nil {
		return Result{}, err
	}
	defer c.Close()
	var res Result
	var took []time.Duration
	b := []byte{'x'}
	start := time.Now()
	for last := start; last.Sub(start) < o.during; {
		if _, err := c.Write(b); err != nil {
			return res, err
		}
		if _, err := io.ReadFull(c, b); err != nil {
			return res, err
		}
		now := time.Now()
		took = append(took, now.Sub(last))
		last = now
	}
	res.Count, res.Seconds = int64(len(took)), time.Since(start).Seconds()
	if len(took) > 100 {
		took = took[10:] // the way is warm after the first ones
	}
	res.percentiles(took)
	return res, nil
}

func open(o options) (Result, error) {
	r, err := newRoad(o)
	if err != nil {
		return Result{}, err
	}
	return together(o, func(until time.Time, note func(time.Duration, error)) {
		for time.Now().Before(until) {
			note(r.once())
			time.Sleep(o.pace)
		}
	}), nil
}

// once is one short tunnel; it returns how long it took until it stood. The server ends it: whoever ends a
// connection first keeps its port for a minute (TIME-WAIT), and the ports of those who connect would run out.
func (r *road) once() (time.Duration, error) {
	start := time.Now()
	c, err := r.tunnel()
	took := time.Since(start)
	if err != nil {
		return took, err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(dialLimit))
	b := [1]byte{askEnd}
	if _, err := c.Write(b[:]); err != nil {
		return took, err
	}
	if _, err := c.Read(b[:]); !errors.Is(err, io.EOF) {
		return took, fmt.Errorf("waiting for the end: %w", err)
	}
	return took, nil
}

// together runs work in o.workers goroutines and adds up what they note.
func together(o options, work func(until time.Time, note func(time.Duration, error))) Result {
	var mu sync.Mutex
	var res Result
	var all []time.Duration
	var wg sync.WaitGroup
	start := time.Now()
	for range o.workers {
		wg.Go(func() {
			var took []time.Duration
			work(start.Add(o.during), func(d time.Duration, err error) {
				if err == nil {
					took = append(took, d)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				if res.Errors++; res.Example == "" {
					res.Example = err.Error()
				}
			})
			mu.Lock()
			defer mu.Unlock()
			all = append(all, took...)
		})
	}
	wg.Wait()
	res.Count, res.Seconds = int64(len(all)), time.Since(start).Seconds()
	res.percentiles(all)
	return res
}

func hold(o options) (Result, error) {
	r, err := newRoad(o)
	if err != nil {
		return Result{}, err
	}
	var res Result
	start := time.Now()
	var conns []*net.TCPConn
	for range o.count {
		c, err := r.tunnel(askEcho)
		if err == nil {
			err = echoed(c)
		}
		if err != nil {
			res.Errors, res.Example = 1, err.Error() // there is no room for more
			break
		}
		conns = append(conns, c)
	}
	res.Count, res.Seconds = int64(len(conns)), time.Since(start).Seconds()
	report(res)
	for _, c := range conns {
		io.Copy(io.Discard, c)
	}
	os.Exit(0) // the result is printed
	return res, nil
}

// echoed proves that the tunnel stands.
func echoed(c *net.TCPConn) error {
	c.SetDeadline(time.Now().Add(dialLimit))
	if _, err := c.Write([]byte{'x'}); err != nil {
		return err
	}
	var b [1]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return err
	}
	return c.SetDeadline(time.Time{})
}
