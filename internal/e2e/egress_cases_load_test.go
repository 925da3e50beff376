package e2e

import (
	"fmt"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/reason"
)

// E25. Without the caps every connection would be served: proxy's TestCapPerSession has one more than its limit
// admits. How much slower the other kid gets is for make bench-egress (its part
// neighbour); here it is served, over and over.
func (c *cases) tenThousandConnections() {
	const crowd = 10_000
	other := c.box.Spawn(c.card(), nil)
	before := c.box.OpenFiles(instance.Proxy)
	done := make(chan []outcome, 1)
	go func() {
		out, err := c.tryAttack(c.kid.Name, step{Kind: "crowd", Host: "echo.vendor.test", Port: portEcho, Count: crowd, Wave: atOnce(500, crowd)})
		if err != nil {
			out = []outcome{{Error: err.Error()}}
		}
		done <- out
	}()
	served := 0
	c.box.Until(2*soon, "every connection of the crowd is served or refused", func() error {
		if !reaches(c.box, other.Name) {
			c.t.Error("the other kid is not served")
		}
		served++
		if c.box.Exec(c.kid.Name, "/usr/bin/test", "-e", "settled").Exit.Code != 0 {
			return fmt.Errorf("not yet; the other kid was served %d times", served)
		}
		return nil
	})
	if !reaches(c.box, other.Name) {
		c.t.Error("the other kid is not served beside a full one")
	}
	c.box.Exec(c.kid.Name, "/usr/bin/touch", "enough")
	o := (<-done)[0]
	if o.Error != "" || o.Silent != 0 || o.Served+o.Refused != crowd || o.Served == 0 || o.Refused < crowd/2 {
		c.t.Fatalf("the crowd: %+v", o)
	}
	full := c.denied(c.kid, code(reason.Capacity))
	if len(full) == 0 {
		c.t.Error("nobody was refused for want of room")
	}
	c.waitDenied("a refused connection", c.kid, uint64(o.Refused), func(r *audit.Record) bool {
		return r.Reason == reason.Capacity || r.Reason == reason.RateLimit || r.Reason == reason.ConnectRate
	})
	c.box.Until(soon, "the proxy lets go of everything", func() error {
		if n := c.box.OpenFiles(instance.Proxy); n > before+16 {
			return fmt.Errorf("%d open files, before it were %d", n, before)
		}
		return nil
	})
	if o, ok := c.echoed("echo.vendor.test"); !ok {
		c.t.Errorf("the kid got no room back: %+v", o)
	}
}
