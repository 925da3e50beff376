package proxy

import (
	"context"
	"net/http"
	"net/netip"

	"tagout/internal/control"
	"tagout/internal/wire"
)

// NamesOver returns the Names of the dnsfilter at the other end of c.
func NamesOver(c *control.Client) Names { return namesClient{c} }

type namesClient struct{ c *control.Client }

func (n namesClient) Name(ctx context.Context, mark uint32, addr netip.Addr) (string, error) {
	var out wire.Name
	err := n.c.Call(ctx, http.MethodPost, "/v1/names", wire.NameQuery{Mark: mark, Addr: addr}, &out)
	return out.Name, err
}

func (n namesClient) Claim(ctx context.Context, mark uint32, name string) error {
	return n.c.Call(ctx, http.MethodPost, "/v1/claims", wire.NameClaim{Mark: mark, Name: name}, nil)
}

// TokensOver returns the Tokens of the credd at the other end of c.
func TokensOver(c *control.Client) Tokens { return tokensClient{c} }

type tokensClient struct{ c *control.Client }

func (t tokensClient) Resolve(ctx context.Context, req wire.ResolveRequest) (wire.ResolveReply, error) {
	var out wire.ResolveReply
	err := t.c.Call(ctx, http.MethodPost, "/v1/resolve", req, &out)
	return out, err
}
