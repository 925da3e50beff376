package main

import (
	"context"
	"net/http"
	"os"
	"time"

	"tagout/internal/authority"
	"tagout/internal/wire"
)

const boxID = "01JD0000000000000000000000"

// knowAda gives the box a list with one person on it and returns her private key.
func (b *box) knowAda() string {
	b.t.Helper()
	private, public, err := authority.NewKey("ada")
	must(b.t, err)
	raw, err := authority.List{Box: boxID, People: []authority.Person{
		{Name: "ada", Roles: []string{authority.RoleStop, authority.RoleRelease}, Key: public},
	}}.Encode()
	must(b.t, err)
	must(b.t, os.WriteFile(b.inst.AuthorityFile(), raw, 0o644)) // not secret
	return private
}

// release asks for a tag to come off with ada's signature.
func (b *box) release(key, stop string) error {
	b.t.Helper()
	o := authority.New(authority.Order{Action: authority.ActionRelease, Box: boxID, Stop: stop, By: "ada", Reason: "done"}, time.Now(), authority.Life)
	raw, err := authority.Sign(o, key)
	must(b.t, err)
	return b.client.Call(context.Background(), http.MethodPost, "/v1/order", wire.SignedOrder{Note: string(raw)}, nil)
}
