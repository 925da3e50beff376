package api

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/kids"
)

// proofLife bounds how long the kid of a proof lives, whatever becomes of whoever asked for it.
const proofLife = time.Minute

// Proofs makes the kids of killswitchd's proofs; *kids.Manager is one.
type Proofs interface {
	SpawnProof(ctx context.Context, actor string, plan kids.Plan) (wire.ProofKid, error)
	SendProof(ctx context.Context, daemon, nonce string) (arrived bool, err error)
	DestroyProofs(ctx context.Context, actor string) error
}

// ProofConfig is what the routes for killswitchd's proofs need.
type ProofConfig struct {
	Proofs      Proofs
	Plan        func() (kids.Plan, error) // the only plan that these routes carry out
	Killswitchd int                       // its uid; nobody else but root may ask
	Ending      <-chan struct{}           // closed when sandboxd ends
}

// RegisterProofs adds the routes with which killswitchd gets the kids of its proofs.
func RegisterProofs(mux *http.ServeMux, cfg ProofConfig) {
	mux.HandleFunc("POST /v1/proof", control.Admit(cfg.spawn, 0, cfg.Killswitchd))
	mux.HandleFunc("POST /v1/proof/packet", control.Admit(cfg.packet, 0, cfg.Killswitchd))
	mux.HandleFunc("DELETE /v1/proof", control.Admit(cfg.destroy, 0, cfg.Killswitchd))
}

// spawn holds the answer open: when the connection breaks, because killswitchd has what it wanted or was killed, the
// kid goes.
func (c ProofConfig) spawn(w http.ResponseWriter, r *http.Request) {
	plan, err := c.Plan()
	if err != nil {
		control.Refuse(w, http.StatusInternalServerError, reason.Internal, err.Error())
		return
	}
	kid, err := c.Proofs.SpawnProof(r.Context(), peerName(r), plan)
	if err != nil {
		refuse(w, err)
		return
	}
	if control.NewStream(w).Send(kid) == nil {
		limit := time.NewTimer(proofLife)
		defer limit.Stop()
		select {
		case <-r.Context().Done():
		case <-limit.C:
		case <-c.Ending:
		}
	}
	c.Proofs.DestroyProofs(context.WithoutCancel(r.Context()), peerName(r)) // recorded there, and tried again until it is done
}

func (c ProofConfig) packet(w http.ResponseWriter, r *http.Request) {
	var p wire.ProofPacket
	if !control.Read(w, r, &p) {
		return
	}
	arrived, err := c.Proofs.SendProof(r.Context(), p.Daemon, p.Nonce)
	if err != nil {
		refuse(w, err)
		return
	}
	control.Reply(w, wire.ProofPacketReply{Arrived: arrived})
}

func (c ProofConfig) destroy(w http.ResponseWriter, r *http.Request) {
	if err := c.Proofs.DestroyProofs(r.Context(), peerName(r)); err != nil {
		refuse(w, err)
		return
	}
	control.Reply(w, struct{}{})
}

// peerName names who asks, as the kernel saw it.
func peerName(r *http.Request) string {
	peer, _ := control.PeerOf(r.Context()) // Admit lets nobody in who is not known
	return fmt.Sprintf("uid:%d", peer.UID)
}
