package main

import (
	"fmt"
	"strings"
	"time"

	"tagout/internal/authority"
	"tagout/internal/doctor"
)

// releasers says whether two people can take any tag off together. There is nothing to say, and ok is false, where
// the box is not set up.
func (a *app) releasers() (c doctor.Check, ok bool) {
	inst, err := a.open()
	if err != nil {
		return c, false
	}
	c = doctor.Check{
		Name: "release", Cost: "a tag that nobody, or somebody who is away, has placed cannot be taken off",
		Fix: "`tagout key new NAME` for three people, their keys and the role release into the box's configuration, then `tagout setup`",
	}
	list, err := authority.NewBook(inst.AuthorityFile(), 0).List()
	if err != nil {
		c.Missing = err.Error()
		return c, true
	}
	names := list.Signers(authority.RoleRelease, time.Now())
	if len(names) < 2 {
		c.Missing = fmt.Sprintf("fewer than two people can sign a release on instance %s: %s", inst.Name(), strings.Join(append(names, "nobody else"), ", "))
		return c, true
	}
	c.OK, c.Found, c.Cost, c.Fix = true, "signed by "+strings.Join(names, ", "), "", ""
	return c, true
}
