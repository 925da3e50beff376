package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// rsyslogPath is where Debian's package puts it.
const rsyslogPath = "/usr/sbin/rsyslogd"

// rsyslogConf takes messages from a socket and has each batch on disk.
const rsyslogConf = `global(workDirectory="%[1]s" maxMessageSize="8k")
module(load="imuxsock" SysSock.Use="off")
input(type="imuxsock" Socket="%[1]s/in" RateLimit.Interval="0" UseSysTimeStamp="off" ParseTrusted="off")
template(name="raw" type="string" string="%%msg:2:$%%\n")
main_queue(queue.dequeueBatchSize="4096" queue.size="100000")
action(type="omfile" file="%[1]s/out" template="raw" sync="on" flushOnTXEnd="on" asyncWriting="off")
`

// rsyslogEach has rsyslog write so many lines, and returns at what rate they came to be in its file.
func rsyslogEach(ctx context.Context, dir string, line []byte, records int) (perSecond float64, err error) {
	if _, err := os.Stat(rsyslogPath); err != nil {
		return 0, errors.New("rsyslogd is not there: `make bench-audit` installs Debian's package")
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return 0, err
	}
	conf := filepath.Join(dir, "conf")
	if err := os.WriteFile(conf, fmt.Appendf(nil, rsyslogConf, dir), 0o600); err != nil {
		return 0, err
	}
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, rsyslogPath, "-n", "-f", conf, "-i", filepath.Join(dir, "pid"))
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	defer func() {
		cmd.Process.Kill() // it has written what is counted
		cmd.Wait()
	}()
	conn, err := dialWhenThere(ctx, filepath.Join(dir, "in"))
	if err != nil {
		return 0, fmt.Errorf("starting rsyslogd: %w: %s", err, said.Bytes())
	}
	defer conn.Close() // everything was written
	msg := append([]byte("<13>Nov 30 09:00:00 tagout: "), bytes.TrimSuffix(line, []byte{'\n'})...)
	begun := time.Now()
	for range records {
		if _, err := conn.Write(msg); err != nil {
			return 0, fmt.Errorf("writing to rsyslogd: %w: %s", err, said.Bytes())
		}
	}
	want := int64(records) * int64(len(line))
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(2 * time.Millisecond) { // between looks at a condition
		info, err := os.Stat(filepath.Join(dir, "out"))
		if err == nil && info.Size() >= want {
			return float64(records) / time.Since(begun).Seconds(), nil
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return 0, fmt.Errorf("rsyslogd did not write all: %v %+v: %s", err, info, said.Bytes())
		}
	}
}

func dialWhenThere(ctx context.Context, path string) (conn net.Conn, err error) {
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline) && ctx.Err() == nil; time.Sleep(5 * time.Millisecond) {
		if conn, err = new(net.Dialer).DialContext(ctx, "unixgram", path); err == nil {
			return conn, nil
		}
	}
	return nil, err
}
