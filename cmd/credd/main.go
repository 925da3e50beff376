// Command credd keeps the secrets of one Tagout instance and answers for its sessions' tokens.
package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"sync"

	"tagout/internal/atomicfile"
	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/config"
	"tagout/internal/control"
	"tagout/internal/credential"
	"tagout/internal/daemon"
	"tagout/internal/instance"
	"tagout/internal/leaks"
	"tagout/internal/metrics"
	"tagout/internal/wire"
)

func main() { daemon.Main(instance.Credd, run) }

func run(ctx context.Context, d *daemon.Daemon) error {
	if err := credential.Harden(d.Log); err != nil {
		return err
	}
	bootID, err := bootclock.Boot()
	if err != nil {
		return fmt.Errorf("reading the boot id: %w", err)
	}
	key, err := handedKey()
	if err != nil {
		return err
	}
	d.Audit.SetScan(leaks.NewRedactor(audit.Redacted).Text)
	save := func(raw []byte) error { return atomicfile.Write(d.Inst.PrintsFile(), raw, 0o640, -1, d.Inst.GroupID()) }
	prints, err := audit.NewPrints(save, func(err error) {
		d.Log.Error("values that were learned now may stand in others' records", "error", err)
	})
	if err != nil {
		return err
	}
	lessors, err := lessors(d.Box)
	if err != nil {
		return err
	}
	kill := control.NewClient(d.Inst.Socket(instance.Killswitchd))
	svc, err := credential.Open(credential.Config{
		Dir:      d.Inst.CreddDir(),
		BootID:   bootID,
		OwnsMark: func(mark uint32) bool { return d.Inst.OwnsMark(mark) && mark != d.Inst.BoxMark() },
		Deny:     d.Box.DenySecrets,
		Tags: func(ctx context.Context) ([]wire.Tag, error) {
			var tags []wire.Tag
			err := kill.Call(ctx, http.MethodGet, "/v1/tags", nil, &tags)
			return tags, err
		},
		Peers: credential.Peers{
			Root: 0, Proxy: d.Inst.UID(instance.Proxy), Killswitchd: d.Inst.UID(instance.Killswitchd), Group: d.Inst.GroupID(),
		},
		Audit: recorder{d.Audit, prints}, Metrics: metrics.NewCredd(d.Metrics), Log: d.Log, Boottime: bootclock.Now, Unlock: key,
		Lifetime: cmp.Or(d.Box.TokenLifetime, config.TokenLifetime),
		Issuer:   issuerConfig(d.Box.Issuer),
		Lessors:  lessors,
	})
	if err != nil {
		return err
	}
	d.Warning = svc.Warning
	door, err := openDoor(ctx, d.Box.Issuer, svc.Door())
	if err != nil {
		return err
	}
	defer door()
	mux := http.NewServeMux()
	svc.Routes(mux)
	// The service ends after the socket: what a last request revoked still gets into the ledger.
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { svc.Run(background) })
	defer context.AfterFunc(ctx, svc.EndStreams)()
	err = d.Serve(ctx, mux, svc.Healthy)
	stop()
	wg.Wait()
	return err
}

// recorder is the audit log; what it must not show, the others' must not show either.
type recorder struct {
	*audit.Logger
	prints *audit.Prints
}

func (r recorder) AddSecret(value string) {
	r.Logger.AddSecret(value)
	r.prints.Add(value)
}

// DropSecret forgets a value that is worth nothing any more, such as a lease that is revoked.
func (r recorder) DropSecret(value string) {
	r.Logger.DropSecret(value)
	r.prints.Remove(value)
}

// maxKey bounds what opens the vault's identity, in bytes.
const maxKey = 4 << 10

// handedKey returns what the supervisor handed over to open the vault's identity, without the line's end; nil where that
// is nothing. It comes in an open file: neither arguments nor environments are private.
func handedKey() ([]byte, error) {
	text := os.Getenv(instance.UnlockEnv)
	if text == "" {
		return nil, nil
	}
	fd, err := strconv.Atoi(text)
	if err != nil || fd < 3 {
		return nil, fmt.Errorf("reading what opens the vault: %s is not the number of an open file", instance.UnlockEnv)
	}
	f := os.NewFile(uintptr(fd), "what opens the vault")
	defer f.Close() // only read
	raw := make([]byte, maxKey+1)
	n, err := io.ReadFull(f, raw)
	switch {
	case err == nil:
		clear(raw)
		return nil, fmt.Errorf("reading what opens the vault: it is longer than %d bytes", maxKey)
	case !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF):
		clear(raw)
		return nil, fmt.Errorf("reading what opens the vault: %w", err)
	}
	return bytes.TrimRight(raw[:n], "\r\n"), nil
}
