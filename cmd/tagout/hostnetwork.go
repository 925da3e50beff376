package main

import (
	"context"
	"net/http"
	"slices"
	"strings"

	"tagout/internal/doctor"
	"tagout/internal/instance"
	"tagout/internal/session"
	"tagout/internal/wire"
)

// onHost returns the kids that live on the machine's network.
func onHost(kids []wire.Kid) []wire.Kid {
	return slices.DeleteFunc(slices.Clone(kids), func(k wire.Kid) bool { return k.Network != session.NetworkHost })
}

// hostText names kids on the machine's network, and who approved each.
func hostText(kids []wire.Kid) string {
	var out []string
	for _, k := range kids {
		by := "NOBODY"
		if k.Approval != nil {
			by = k.Approval.By
		}
		out = append(out, k.Name+" is on the machine's network, approved by "+by)
	}
	return strings.Join(out, "; ")
}

// hostKids warns of kids on the machine's network. There is nothing to say, and ok is false, where sandboxd does not say.
func (a *app) hostKids(ctx context.Context) (c doctor.Check, ok bool) {
	if _, err := a.open(); err != nil {
		return c, false
	}
	ctx, cancel := context.WithTimeout(ctx, healthLimit)
	defer cancel()
	var kids []wire.Kid
	if err := a.callWith(ctx, instance.Sandboxd, http.MethodGet, "/v1/kids", nil, &kids); err != nil {
		return c, false
	}
	c = doctor.Check{Name: "host-network", OK: true, Found: "no kid lives on the machine's network"}
	if on := onHost(kids); len(on) > 0 {
		c.OK, c.Found, c.Missing = false, "", hostText(on)
		c.Cost = "proxy and dnsfilter see nothing of them: only the kernel's programs hold them, by address"
		c.Fix = "destroy them when their work is done"
	}
	return c, true
}
