package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strconv"

	"golang.org/x/sys/unix"

	"tagout/internal/control"
	"tagout/internal/wire"
)

// callHere sends one resolve request without leaving the calling thread, whose credentials differ from the
// process's.
func callHere(socket string, in wire.ResolveRequest, out *wire.ResolveReply) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequest(http.MethodPost, "http://credd/v1/resolve", bytes.NewReader(body)) // blocking on purpose
	if err != nil {
		return err
	}
	resp, err := sendHere(socket, req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() // read below
	if resp.StatusCode != http.StatusOK {
		var p wire.Problem
		if err := json.NewDecoder(resp.Body).Decode(&p); err != nil {
			return err
		}
		return &control.Error{Problem: p}
	}
	return json.NewDecoder(resp.Body).Decode(out)
}

// sendHere sends a request on the calling thread and returns the whole answer.
func sendHere(socket string, req *http.Request) (*http.Response, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd) // nothing is buffered
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: socket}); err != nil {
		return nil, err
	}
	req.Close = true
	if err := req.Write(fdStream(fd)); err != nil {
		return nil, err
	}
	resp, err := http.ReadResponse(bufio.NewReader(fdStream(fd)), req)
	if err != nil {
		return nil, err
	}
	raw, err := io.ReadAll(resp.Body)
	resp.Body = io.NopCloser(bytes.NewReader(raw))
	return resp, err
}

// fdStream reads and writes a blocking socket.
type fdStream int

func (s fdStream) Read(p []byte) (int, error) {
	n, err := unix.Read(int(s), p)
	if n == 0 && err == nil {
		return 0, io.EOF
	}
	return max(n, 0), err
}

func (s fdStream) Write(p []byte) (int, error) { return unix.Write(int(s), p) }

func itoa(n int) string { return strconv.Itoa(n) }
