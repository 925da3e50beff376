package killswitch

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"

	"tagout/internal/control"
	"tagout/internal/wire"
)

// SandboxdProofs is the ProofKids that asks sandboxd over its socket.
type SandboxdProofs struct{ client *control.Client }

// NewSandboxdProofs returns the client for the socket at path. Nothing is dialled yet.
func NewSandboxdProofs(path string) SandboxdProofs {
	return SandboxdProofs{client: control.NewClient(path)}
}

// Spawn holds the connection on which it asked until ctx ends: its end is the kid's, however it comes about.
func (s SandboxdProofs) Spawn(ctx context.Context, lost func()) (wire.ProofKid, error) {
	type answer struct {
		kid wire.ProofKid
		err error
	}
	first := make(chan answer, 1)
	go func() {
		defer s.client.CloseIdle()
		told := false
		err := s.client.Each(ctx, http.MethodPost, "/v1/proof", nil, func(line json.RawMessage) error {
			var kid wire.ProofKid
			if err := json.Unmarshal(line, &kid); err != nil {
				return err
			}
			if !told {
				told = true
				first <- answer{kid: kid}
			}
			return nil
		})
		if told {
			lost()
			return
		}
		if err == nil {
			err = errors.New("sandboxd ended the answer before it named a kid")
		}
		first <- answer{err: err}
	}()
	a := <-first // ends when ctx does
	return a.kid, a.err
}

// Packet has sandboxd send one packet with the kid's mark from where a daemon lives.
func (s SandboxdProofs) Packet(ctx context.Context, daemon, nonce string) (arrived bool, err error) {
	defer s.client.CloseIdle()
	var reply wire.ProofPacketReply
	err = s.client.Call(ctx, http.MethodPost, "/v1/proof/packet", wire.ProofPacket{Daemon: daemon, Nonce: nonce}, &reply)
	return reply.Arrived, err
}

// Destroy returns when the kids of all proofs are gone.
func (s SandboxdProofs) Destroy(ctx context.Context) error {
	defer s.client.CloseIdle()
	return s.client.Call(ctx, http.MethodDelete, "/v1/proof", nil, nil)
}

// SocketOrders is the ProofOrders that dials killswitchd's own socket.
type SocketOrders struct{ client *control.Client }

// NewSocketOrders returns the client for the socket at path. Nothing is dialled yet.
func NewSocketOrders(path string) SocketOrders { return SocketOrders{client: control.NewClient(path)} }

// Stop orders a stop, as `tagout stop` does, and returns its report.
func (s SocketOrders) Stop(ctx context.Context, r wire.StopRequest) (wire.StopReport, error) {
	defer s.client.CloseIdle()
	var final *wire.StopReport
	err := s.client.Each(ctx, http.MethodPost, "/v1/stop", r, func(line json.RawMessage) error {
		var e wire.StopEvent
		if err := json.Unmarshal(line, &e); err != nil {
			return err
		}
		if e.Final != nil {
			final = e.Final
		}
		return nil
	})
	switch {
	case err != nil:
		return wire.StopReport{}, err
	case final == nil:
		return wire.StopReport{}, errors.New("its stream ended without a report")
	}
	return *final, nil
}
