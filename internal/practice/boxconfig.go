package practice

import (
	"fmt"
	"net/netip"
	"os"
	"time"

	auth "tagout/internal/authority"
	"tagout/internal/config"
	"tagout/internal/wire"
)

// The people whom the practice box lets give orders. The example cards name the first.
const (
	Authority = "Ada Operator"
	Second    = "Grace Approver"
	Third     = "Lin Approver"
)

// IssuerURL is what the practice box is called as an issuer of tokens. Nobody serves there: the practice internet's own
// services reach credd over its unix socket.
const IssuerURL = "https://issuer.own.test"

// people have the roles that they have on the practice box.
func people() []config.Authority {
	return []config.Authority{
		{Name: Authority, Roles: []string{auth.RoleSpawn, auth.RoleGrant, auth.RoleStop, auth.RoleRelease}},
		{Name: Second, Roles: []string{auth.RoleStop, auth.RoleRelease, auth.RoleHost}},
		{Name: Third, Roles: []string{auth.RoleRelease}},
	}
}

// makeKeys gives everybody a key. The private halves live in this process alone.
func (n *Internet) makeKeys() error {
	n.private, n.people = map[string]string{}, people()
	for i := range n.people {
		p := &n.people[i]
		var err error
		if n.private[p.Name], p.Key, err = auth.NewKey(p.Name); err != nil {
			return err
		}
	}
	return nil
}

// BoxConfig is the configuration of a box whose outside world is this internet: it resolves here, trusts the
// practice CA beside the system's, posts its alerts to the webhook, and takes orders from three people whose keys
// this internet holds.
func (n *Internet) BoxConfig() config.Box {
	return config.Box{
		Resolvers:    []netip.AddrPort{netip.AddrPortFrom(n.DNSAddr(), 53)},
		UpstreamCAs:  []string{n.CAFile()},
		AlertWebhook: n.WebhookURL(),
		Authorities:  append([]config.Authority(nil), n.people...),
		Issuer:       config.Issuer{URL: IssuerURL, TrustDomain: "own.test", Algorithm: "EdDSA", Lifetime: config.DefaultTokenLife, RotateEvery: config.DefaultRotation},
	}
}

// Sign signs an order for the box of this internet, which must be set up, by one of its people. o.Box, o.By and
// the times are filled in.
func (n *Internet) Sign(o auth.Order, by string) (wire.SignedOrder, error) {
	list, err := auth.NewBook(n.inst.AuthorityFile(), os.Geteuid()).List()
	if err != nil {
		return wire.SignedOrder{}, err
	}
	o.Box, o.By = list.Box, by
	life := auth.Life
	if o.Action == auth.ActionHost {
		life = auth.HostLife
	}
	raw, err := auth.Sign(auth.New(o, time.Now(), life), n.private[by])
	if err != nil {
		return wire.SignedOrder{}, fmt.Errorf("ordering as %s: %w", by, err)
	}
	return wire.SignedOrder{Note: string(raw)}, nil
}

// Key returns the private key of one of the people; "" where nobody is called so.
func (n *Internet) Key(person string) string { return n.private[person] }
