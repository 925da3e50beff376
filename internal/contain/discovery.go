package contain

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"
)

func sockets() []attempt {
	const docker, abstract = "docker socket", "abstract unix sockets"
	return []attempt{
		{docker, "call a socket outside", func(t Target) error { return dials("unix", t.Socket) }},
		{docker, "call a container engine", func(Target) error {
			return anyOf([]string{"/run/docker.sock", "/var/run/docker.sock", "/run/containerd/containerd.sock", "/run/podman/podman.sock", "/run/crio/crio.sock"},
				func(path string) error { return dials("unix", path) })
		}},
		{docker, "call one of Tagout's daemons", func(Target) error {
			paths, err := filepath.Glob("/run/tagout/*/sock/*/*.sock")
			if err != nil {
				return err
			}
			return anyOf(paths, func(path string) error { return dials("unix", path) })
		}},
		{abstract, "call an abstract socket outside", func(t Target) error { return dials("unix", "@"+t.Abstract) }},
		{abstract, "see the sockets of others", func(t Target) error {
			raw, err := os.ReadFile("/proc/net/unix")
			if err == nil && !bytes.Contains(raw, []byte("@"+t.Abstract)) {
				err = errors.New("it is not listed")
			}
			return err
		}},
	}
}

// dialLimit is for what does not answer at all.
const dialLimit = 2 * time.Second

func dials(network, addr string) error {
	ctx, cancel := context.WithTimeout(context.Background(), dialLimit)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err == nil {
		conn.Close() // nothing was said
	}
	return err
}

func discovery() []attempt {
	const class = "environment and history of the host"
	return []attempt{
		{class, "find the outside's environment in our own", func(t Target) error { return inEnviron("/proc/self/environ", t.Env) }},
		{class, "find it in a process outside", func(t Target) error { return inEnviron(fmt.Sprintf("/proc/%d/environ", t.PID), t.Env) }},
		{class, "read somebody's history", func(Target) error {
			files, err := filepath.Glob("/home/*/.*history")
			if err != nil {
				return err
			}
			return anyOf(append(files, "/root/.bash_history", "/root/.python_history", "/root/.profile"), tells)
		}},
		{class, "list the machine's logs", func(Target) error { return hasFiles("/var/log") }},
		{class, "list what runs on the machine", func(Target) error { return hasFiles("/run") }},
		{class, "learn the machine's name", func(t Target) error {
			name, err := os.Hostname()
			if err == nil && name != t.Host {
				err = errors.New("it has another name here")
			}
			return err
		}},
		{class, "read how the machine was booted", func(Target) error { return tells("/proc/cmdline") }},
	}
}

func inEnviron(path, pair string) error {
	raw, err := os.ReadFile(path)
	if err == nil && !bytes.Contains(append([]byte{0}, raw...), []byte("\x00"+pair+"\x00")) {
		err = errors.New("it is not there")
	}
	return err
}

// hasFiles returns nil where anything but directories is there: a kid may have empty ones of its own.
func hasFiles(dir string) error {
	found := errors.New("it is empty")
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case path == dir:
			return err
		case err != nil || !d.IsDir(): // what may not be looked into is somebody's
			found = nil
			return fs.SkipAll
		}
		return nil
	})
	return errors.Join(found, err)
}

// metadata are the addresses at which clouds hand out a machine's credentials.
func metadata() []attempt {
	const class = "metadata service"
	var out []attempt
	for _, addr := range MetadataAddrs() {
		out = append(out, attempt{class, "call " + addr, func(Target) error { return dials("tcp", net.JoinHostPort(addr, "80")) }})
	}
	return out
}

// MetadataAddrs are the addresses that the attempts call at port 80.
func MetadataAddrs() []string { return []string{"169.254.169.254", "100.100.100.200", "fd00:ec2::254"} }
