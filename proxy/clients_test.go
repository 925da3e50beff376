package proxy

import (
	"context"
	"errors"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"tagout/internal/control"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// The clients of dnsfilter and credd, over real unix sockets with the answers that package wire promises.
func TestClientsOverSockets(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/names", func(w http.ResponseWriter, r *http.Request) {
		var q wire.NameQuery
		if !control.Read(w, r, &q) {
			return
		}
		if q.Mark != kidMark || q.Addr != netip.MustParseAddr("198.18.240.77") {
			control.Refuse(w, http.StatusNotFound, reason.VirtualUnknown, "not given out")
			return
		}
		control.Reply(w, wire.Name{Name: fileHost})
	})
	mux.HandleFunc("POST /v1/resolve", func(w http.ResponseWriter, r *http.Request) {
		var q wire.ResolveRequest
		if !control.Read(w, r, &q) {
			return
		}
		if q.Token != token {
			control.Refuse(w, http.StatusForbidden, reason.TokenUnknown, "unknown token")
			return
		}
		control.Reply(w, wire.ResolveReply{Secret: "api", Value: realValue})
	})
	l, err := control.Listen(filepath.Join(t.TempDir(), "s"), os.Getgid())
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- control.Serve(ctx, l, mux, time.Second) }()
	client := control.NewClient(l.Addr().String())
	names, tokens := NamesOver(client), TokensOver(client)

	if name, err := names.Name(ctx, kidMark, netip.MustParseAddr("198.18.240.77")); err != nil || name != fileHost {
		t.Errorf("name %q, %v", name, err)
	}
	if _, err := names.Name(ctx, kidMark, netip.MustParseAddr("198.18.240.78")); control.Status(err) != http.StatusNotFound {
		t.Errorf("an unknown address: %v", err)
	}
	x := &exchange{rule: &policy.Rule{}}
	if reply, err := tokens.Resolve(ctx, wire.ResolveRequest{Token: token}); err != nil || reply.Value != realValue {
		t.Errorf("reply %v", err)
	}
	_, err = tokens.Resolve(ctx, wire.ResolveRequest{Token: otherToken})
	if got := x.tokenRefusal(err); got.code != reason.TokenUnknown {
		t.Errorf("an unknown token: %v", got)
	}
	client.CloseIdle()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	_, err = tokens.Resolve(context.Background(), wire.ResolveRequest{Token: token})
	if got := x.tokenRefusal(err); got.code != reason.CreddDown || errors.Is(err, context.Canceled) {
		t.Errorf("a dead credd: %v, %v", got, err)
	}
}
