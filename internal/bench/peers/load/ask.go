package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/ipv4"
)

func get(o options) (Result, error) {
	r, err := newRoad(o)
	if err != nil {
		return Result{}, err
	}
	cfg := &tls.Config{ServerName: o.sni, NextProtos: []string{"http/1.1"}}
	if o.ca != "" {
		pem, err := os.ReadFile(o.ca)
		if err != nil {
			return Result{}, err
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return Result{}, fmt.Errorf("%s holds no certificate", o.ca)
		}
	}
	request := fmt.Appendf(nil, "GET %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: load\r\n\r\n", o.path, o.sni)
	return together(o, func(until time.Time, note func(time.Duration, error)) {
		if err := r.requests(cfg, request, o.pace, until, note); err != nil {
			note(0, err)
		}
	}), nil
}

// requests sends one request after the other on one connection.
func (r *road) requests(cfg *tls.Config, request []byte, pace time.Duration, until time.Time, note func(time.Duration, error)) error {
	tcp, err := r.dial()
	if err != nil {
		return err
	}
	defer tcp.Close()
	c := tls.Client(tcp, cfg)
	if err := c.Handshake(); err != nil {
		return err
	}
	br := bufio.NewReader(c)
	for time.Now().Before(until) {
		start := time.Now()
		if _, err := c.Write(request); err != nil {
			return err
		}
		if err := readAnswer(br); err != nil {
			return err
		}
		note(time.Since(start), nil)
		time.Sleep(pace)
	}
	return nil
}

// readAnswer reads one answer of known length, whose status must be 200.
func readAnswer(br *bufio.Reader) error {
	status, err := br.ReadString('\n')
	if err != nil {
		return err
	}
	if !strings.Contains(status, " 200 ") {
		return fmt.Errorf("answered %q", status)
	}
	length := -1
	for {
		line, err := br.ReadSlice('\n')
		if err != nil {
			return err
		}
		if len(line) <= 2 {
			break
		}
		if key, value, ok := bytes.Cut(line, []byte(":")); ok && bytes.EqualFold(key, []byte("Content-Length")) {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil {
				return err
			}
		}
	}
	if length < 0 {
		return errors.New("an answer without Content-Length")
	}
	_, err = br.Discard(length)
	return err
}

// dnsPatience is how long answers may take before the window is sent again: datagrams get lost.
const dnsPatience = 200 * time.Millisecond

// codeRefused is the answer to what may not be asked (RFC 1035, section 4.1.1).
const codeRefused = 5

func queries(o options) (Result, error) {
	var mu sync.Mutex
	var res Result
	var wg sync.WaitGroup
	errs := make(chan error, o.workers)
	start := time.Now()
	for range o.workers {
		wg.Go(func() {
			one, err := asker(o, start.Add(o.during))
			if err != nil {
				errs <- err
				return
			}
			mu.Lock()
			defer mu.Unlock()
			res.Count += one.Count
			res.Errors += one.Errors
			if res.Example == "" {
				res.Example = one.Example
			}
		})
	}
	wg.Wait()
	res.Seconds = time.Since(start).Seconds()
	select {
	case err := <-errs:
		return res, err
	default:
		return res, nil
	}
}

// asker keeps one socket's window of queries full. Count is the good answers, Errors the others.
func asker(o options, until time.Time) (Result, error) {
	var res Result
	c, err := net.Dial("udp4", o.to)
	if err != nil {
		return res, err
	}
	defer c.Close()
	pc := ipv4.NewPacketConn(c.(net.PacketConn))
	out, in := messages(o.window, query(o.sni)), messages(o.window, make([]byte, 512))
	send := func(n int) error {
		for sent := 0; sent < n; {
			k, err := pc.WriteBatch(out[sent:n], 0)
			if err != nil {
				return err
			}
			sent += k
		}
		return nil
	}
	if err := send(o.window); err != nil {
		return res, err
	}
	for time.Now().Before(until) {
		c.SetReadDeadline(time.Now().Add(dnsPatience))
		n, err := pc.ReadBatch(in, 0)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			n, err = o.window, nil
			if err := send(n); err != nil {
				return res, err
			}
			continue
		}
		if err != nil {
			return res, err
		}
		for _, m := range in[:n] {
			res.judge(m.Buffers[0][:m.N], o.refused)
		}
		if err := send(n); err != nil {
			return res, err
		}
	}
	return res, nil
}

// judge counts an answer that holds an address, or with refused one that says REFUSED; anything else is an error.
func (r *Result) judge(msg []byte, refused bool) {
	code, records := -1, uint16(0)
	if len(msg) > 12 {
		code, records = int(msg[3]&0xF), binary.BigEndian.Uint16(msg[6:])
	}
	if !refused && code == 0 && records == 1 || refused && code == codeRefused && records == 0 {
		r.Count++
		return
	}
	if r.Errors++; r.Example == "" && code >= 0 {
		r.Example = fmt.Sprintf("answered with code %d and %d records", code, records)
	}
}

func messages(n int, body []byte) []ipv4.Message {
	out := make([]ipv4.Message, n)
	for i := range out {
		out[i].Buffers = [][]byte{bytes.Clone(body)}
		if i < 1<<16 && len(body) > 1 {
			binary.BigEndian.PutUint16(out[i].Buffers[0], uint16(i))
		}
	}
	return out
}

// query is a question for the A records of name (RFC 1035).
func query(name string) []byte {
	msg := []byte{0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}
	for label := range strings.SplitSeq(name, ".") {
		msg = append(append(msg, byte(len(label))), label...)
	}
	return append(msg, 0, 0, 1, 0, 1)
}
