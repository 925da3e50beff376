package drill

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"

	"tagout/internal/authority"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// Box is what a drill asks of the box under test.
type Box interface {
	Spawn(ctx context.Context, req wire.SpawnRequest) (wire.Kid, error)
	// Exec runs a command and returns when it has ended, when ctx ends or when the stream breaks.
	Exec(ctx context.Context, kid string, req wire.ExecRequest, fn func(wire.ExecFrame)) error
	Destroy(ctx context.Context, kid, why string) error
	// Stop orders a stop, calls fn with each event as it comes, and returns the final report.
	Stop(ctx context.Context, req wire.StopRequest, fn func(wire.StopEvent)) (*wire.StopReport, error)
	Release(ctx context.Context, req wire.ReleaseRequest) error
}

// Sockets returns the box behind the instance's unix sockets. net's people sign releases; it may be nil where
// nothing is released.
func Sockets(inst instance.Instance, net *practice.Internet) Box {
	return sockets{
		net:      net,
		sandboxd: control.NewClient(inst.Socket(instance.Sandboxd)),
		killer:   control.NewClient(inst.Socket(instance.Killswitchd)),
	}
}

type sockets struct {
	net              *practice.Internet
	sandboxd, killer *control.Client
}

func (s sockets) Spawn(ctx context.Context, req wire.SpawnRequest) (wire.Kid, error) {
	var kid wire.Kid
	err := s.sandboxd.Call(ctx, http.MethodPost, "/v1/kids", req, &kid)
	return kid, err
}

func (s sockets) Exec(ctx context.Context, kid string, req wire.ExecRequest, fn func(wire.ExecFrame)) error {
	route := "/v1/kids/" + url.PathEscape(kid) + "/exec"
	return s.sandboxd.Each(ctx, http.MethodPost, route, req, func(raw json.RawMessage) error {
		var f wire.ExecFrame
		if err := json.Unmarshal(raw, &f); err != nil {
			return fmt.Errorf("reading an output frame of kid %s: %w", kid, err)
		}
		fn(f)
		return nil
	})
}

func (s sockets) Destroy(ctx context.Context, kid, why string) error {
	route := "/v1/kids/" + url.PathEscape(kid) + "?reason=" + url.QueryEscape(why)
	return s.sandboxd.Call(ctx, http.MethodDelete, route, nil, nil)
}

func (s sockets) Stop(ctx context.Context, req wire.StopRequest, fn func(wire.StopEvent)) (*wire.StopReport, error) {
	var final *wire.StopReport
	err := s.killer.Each(ctx, http.MethodPost, "/v1/stop", req, func(raw json.RawMessage) error {
		var ev wire.StopEvent
		if err := json.Unmarshal(raw, &ev); err != nil {
			return fmt.Errorf("reading the stop's progress: %w", err)
		}
		fn(ev)
		if ev.Final != nil {
			final = ev.Final
		}
		return nil
	})
	if err == nil && final == nil {
		err = errors.New("killswitchd ended its answer without a report")
	}
	return final, err
}

func (s sockets) Release(ctx context.Context, req wire.ReleaseRequest) error {
	order, err := s.net.Sign(authority.Order{Action: authority.ActionRelease, Stop: req.Stop, Reason: req.Reason}, req.By)
	if err != nil {
		return err
	}
	return s.killer.Call(ctx, http.MethodPost, "/v1/order", order, nil)
}
