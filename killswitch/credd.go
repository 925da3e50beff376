package killswitch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"

	"golang.org/x/sys/unix"

	"tagout/internal/control"
	"tagout/internal/wire"
)

// Credd is the Credentials that asks credd over its socket.
type Credd struct {
	client *control.Client
	path   string
}

// NewCredd returns the client for the socket at path. Nothing is dialled yet.
func NewCredd(path string) Credd { return Credd{client: control.NewClient(path), path: path} }

// Revoke has credd forget the tokens of the sessions in r. An answer that is not this order's is an error.
func (c Credd) Revoke(ctx context.Context, r wire.RevokeRequest) (int, error) {
	// Each call dials: a connection that was kept open may lead to a credd that is dead.
	defer c.client.CloseIdle()
	var reply wire.RevokeReply
	if err := c.client.Call(ctx, http.MethodPost, "/v1/revoke", r, &reply); err != nil {
		return 0, err
	}
	if reply.Nonce != r.Nonce {
		return 0, errors.New("credd answered another order than this one")
	}
	return reply.Revoked, nil
}

// Server connects to credd's socket and asks the kernel who listens there (SO_PEERCRED, unix(7)). It does not
// need credd to do anything, so it tells of one that hangs, too.
func (c Credd) Server(ctx context.Context) (pid int, err error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", c.path)
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("looking who serves %s: %w", c.path, err)
	}
	defer conn.Close() // nothing was written
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("looking who serves %s: %w", c.path, err)
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || credErr != nil {
		return 0, fmt.Errorf("looking who serves %s: %w", c.path, errors.Join(err, credErr))
	}
	return int(cred.Pid), nil
}

// Reachable asks whether credd serves.
func (c Credd) Reachable(ctx context.Context) error {
	defer c.client.CloseIdle()
	return c.client.Call(ctx, http.MethodGet, "/healthz", nil, nil)
}

// Active asks credd whether it would accept a token now.
func (c Credd) Active(ctx context.Context, token string) (bool, error) {
	defer c.client.CloseIdle()
	var out wire.Introspection
	if err := c.client.Form(ctx, "/introspect", url.Values{"token": {token}}, &out); err != nil {
		return false, err
	}
	return out.Active, nil
}
