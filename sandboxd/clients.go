package sandboxd

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"golang.org/x/sys/unix"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/session"
	"tagout/internal/wire"
	"tagout/sandboxd/guard"
	"tagout/sandboxd/kids"
)

// killswitchd asks killswitchd.
type killswitchd struct{ client *control.Client }

func (k killswitchd) Clear(ctx context.Context, scope wire.Scope) error {
	err := k.ask(ctx, http.MethodPost, "/v1/clear", scope, nil)
	if control.Status(err) == http.StatusLocked {
		return fmt.Errorf("%w: %w", kids.ErrTagged, err)
	}
	return err
}

func (k killswitchd) Tags(ctx context.Context) ([]wire.Tag, error) {
	var tags []wire.Tag
	err := k.ask(ctx, http.MethodGet, "/v1/tags", nil, &tags)
	return tags, err
}

// renew renews the kids' lease, or says why not.
func (k killswitchd) renew(ctx context.Context, r wire.LeaseRequest) error {
	return k.ask(ctx, http.MethodPost, "/v1/lease", r, nil)
}

// ask asks a second time where a kept connection may have been a dead predecessor's. What is asked changes
// nothing the second time, so asking twice is harmless.
func (k killswitchd) ask(ctx context.Context, method, route string, in, out any) error {
	err := k.client.Call(ctx, method, route, in, out)
	if err == nil || control.Status(err) != 0 || isDown(err) {
		return err
	}
	k.client.CloseIdle()
	return k.client.Call(ctx, method, route, in, out)
}

// point is the proxy or dnsfilter.
type point struct {
	name   string
	client *control.Client
}

func (p point) Name() string { return p.name }

func (p point) Put(ctx context.Context, s *session.Session) (wire.Ack, error) {
	var ack wire.Ack
	err := p.client.Call(ctx, http.MethodPut, "/v1/sessions/"+s.Kid, s, &ack)
	return ack, err
}

func (p point) Delete(ctx context.Context, kid string) error { return forget(ctx, p.client, kid) }

// credd asks credd.
type credd struct{ client *control.Client }

func (c credd) Mint(ctx context.Context, r wire.MintRequest) (wire.MintReply, error) {
	var reply wire.MintReply
	err := c.client.Call(ctx, http.MethodPost, "/v1/sessions", r, &reply)
	return reply, refusal(err)
}

func (c credd) Renew(ctx context.Context, kid string) (wire.MintReply, error) {
	var reply wire.MintReply
	err := c.client.Call(ctx, http.MethodPost, "/v1/sessions/"+kid+"/renew", nil, &reply)
	return reply, refusal(err)
}

// refusal turns credd's word that it will not mint this into the request's own fault; that credd does not
// answer is left as it is.
func refusal(err error) error {
	var said *control.Error
	if !errors.As(err, &said) {
		return err
	}
	switch said.Problem.Status {
	case http.StatusForbidden, http.StatusNotFound:
		return &kids.Error{Kind: kids.Invalid, Reason: said.Problem.Reason, Err: err}
	case http.StatusLocked:
		return &kids.Error{Kind: kids.Tagged, Reason: said.Problem.Reason, Err: err}
	case http.StatusBadGateway: // a provider gives no lease
		return &kids.Error{Kind: kids.Unavailable, Reason: said.Problem.Reason, Err: err}
	}
	return err
}

func (c credd) Use(ctx context.Context, kid string) (*wire.CredentialUse, error) {
	var use wire.CredentialUse
	err := c.client.Call(ctx, http.MethodGet, "/v1/sessions/"+kid+"/use", nil, &use)
	switch {
	case control.Status(err) == http.StatusNotFound:
		return nil, nil
	case err != nil:
		return nil, err
	}
	return &use, nil
}

func (c credd) Forget(ctx context.Context, kid string) error { return forget(ctx, c.client, kid) }

func forget(ctx context.Context, c *control.Client, kid string) error {
	err := c.Call(ctx, http.MethodDelete, "/v1/sessions/"+kid, nil, nil)
	if isDown(err) {
		return fmt.Errorf("%w: %w", kids.ErrDown, err)
	}
	return err
}

// isDown says whether nobody serves the socket: it is missing, or its listener is gone (unix(7)).
func isDown(err error) bool {
	return errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT)
}

// clients connects to the other daemons of the instance. Nothing is dialled yet.
func clients(inst instance.Instance) (kids.Stopper, []kids.PolicyPoint, kids.Credentials) {
	client := func(daemon string) *control.Client { return control.NewClient(inst.Socket(daemon)) }
	return killswitchd{client(instance.Killswitchd)},
		[]kids.PolicyPoint{point{instance.Proxy, client(instance.Proxy)}, point{instance.DNSFilter, client(instance.DNSFilter)}},
		credd{client(instance.Credd)}
}

// checks ask those that guard the kids whether they are well. A daemon that works but cannot record is not: its health
// carries a warning then.
func checks(inst instance.Instance, log interface{ Err() error }) []guard.Check {
	out := []guard.Check{{Name: "audit log", Ask: func(context.Context) error { return log.Err() }}}
	for _, daemon := range []string{instance.Proxy, instance.DNSFilter, instance.Credd} {
		client := control.NewClient(inst.Socket(daemon))
		out = append(out, guard.Check{Name: daemon, Ask: func(ctx context.Context) error {
			defer client.CloseIdle() // a kept connection may lead to one that is dead
			var health wire.Health
			err := client.Call(ctx, http.MethodGet, "/healthz", nil, &health)
			if err == nil && health.Warning != "" {
				err = errors.New(health.Warning)
			}
			return err
		}})
	}
	return out
}
