package killswitch

import (
	"context"
	"net/http"

	"tagout/internal/control"
	"tagout/internal/wire"
)

// Credd is the Credentials that asks credd over its socket.
type Credd struct{ client *control.Client }

// NewCredd returns the client for the socket at path. Nothing is dialled yet.
func NewCredd(path string) Credd { return Credd{client: control.NewClient(path)} }

// Revoke has credd forget the tokens of the sessions in r.
func (c Credd) Revoke(ctx context.Context, r wire.RevokeRequest) (int, error) {
	// Each call dials: a connection that was kept open may lead to a credd that is dead.
	defer c.client.CloseIdle()
	var reply wire.RevokeReply
	if err := c.client.Call(ctx, http.MethodPost, "/v1/revoke", r, &reply); err != nil {
		return 0, err
	}
	return reply.Revoked, nil
}

// Reachable asks whether credd serves.
func (c Credd) Reachable(ctx context.Context) error {
	defer c.client.CloseIdle()
	return c.client.Call(ctx, http.MethodGet, "/healthz", nil, nil)
}
