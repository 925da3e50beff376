package e2e

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

var (
	egressHeavy = flag.Bool("egress.heavy", false, "run E25 and E26 at full size: 10,000 connections and lookups at once, 10 GB")
	egressFor   = flag.Duration("egress.for", 2*time.Second, "how long the long transfer of E26 takes; from 30m an idle connection is seen to be cut")
)

// The proxy's own times, which no configuration changes: its Limits.Idle and Limits.Progress.
const (
	idleLimit     = 30 * time.Minute
	progressEvery = time.Minute
)

// atOnce is few, or whole at full size.
func atOnce(few, whole int) int {
	if *egressHeavy {
		return whole
	}
	return few
}

// longBytes is how much long.vendor.test sends.
func longBytes() int64 {
	if *egressHeavy {
		return 10_000_000_000
	}
	return manyBytes
}

// sendLong is long.vendor.test: it sends longBytes in portions, the last one at the end of egressFor.
func sendLong(conn *net.TCPConn) {
	const every = 100 * time.Millisecond
	portions := max(int64(*egressFor/every), 1)
	buf := make([]byte, 1<<20)
	tick := time.NewTicker(every) // the pace of the transfer
	defer tick.Stop()
	for i := range portions {
		<-tick.C
		for left := longBytes()*(i+1)/portions - longBytes()*i/portions; left > 0; {
			n, err := conn.Write(buf[:min(left, int64(len(buf)))])
			if err != nil {
				return
			}
			left -= int64(n)
		}
	}
	conn.CloseWrite()
}

// longAttack is one step of attack that may take as long as it wants. The channel gets its outcome.
func (c *cases) longAttack(s step) chan outcome {
	done := make(chan outcome, 1)
	go func() {
		in, err := json.Marshal([]step{s})
		if err != nil {
			panic(err) // of strings and numbers
		}
		got, err := c.box.TryLongExec(context.Background(), c.kid.Name, wire.ExecRequest{Argv: []string{"/usr/bin/python3", "-c", attackPy}, Stdin: in})
		if err == nil {
			var out []outcome
			if out, err = outcomes(strings.NewReader(got.Stdout), 1); err == nil {
				done <- out[0]
				return
			}
		}
		done <- outcome{Error: fmt.Sprintf("%v: %s", err, got.Stderr)}
	}()
	return done
}

// longTransfer: E26. The counts of a transfer that goes on and on are exact at its end, and never go beyond it before.
// Beside it a connection without a byte lives until the idle limit, and no longer.
func (c *cases) longTransfer() {
	c.box.Exec(c.kid.Name, "/usr/bin/rm", "-f", "quiet", "enough")
	idle := c.longAttack(step{Kind: "idle", Host: "echo.vendor.test", Port: portEcho})
	quiet := time.Now()
	c.box.Until(soon, "the idle connection stands", func() error {
		if c.box.Exec(c.kid.Name, "/usr/bin/test", "-e", "quiet").Exit.Code != 0 {
			return fmt.Errorf("not yet")
		}
		return nil
	})
	o := <-c.longAttack(step{Kind: "long", Host: "long.vendor.test", Port: portLong})
	took := time.Duration(o.Took * float64(time.Second))
	if o.Error != "" || o.End != "eof" || o.Size != longBytes() || took < *egressFor-time.Second {
		c.t.Errorf("a transfer of %d bytes in %v: %+v", longBytes(), *egressFor, o)
	}
	rec := c.box.WaitRecord("the end of the long transfer", func(r *audit.Record) bool {
		return r.Session == c.kid.Session && r.Event == audit.EventConnClosed && named("long.vendor.test")(r)
	})
	if rec.Bytes == nil || *rec.Bytes != (audit.Bytes{Down: longBytes()}) {
		c.t.Errorf("counted %+v, want %d bytes down", rec.Bytes, longBytes())
	}
	c.longProgress(rec.Conn, took)
	c.idleEnds(idle, quiet)
}

// longProgress looks at the records in between of the connection that took so long.
func (c *cases) longProgress(conn string, took time.Duration) {
	var down []int64
	for _, r := range c.box.Records(func(r *audit.Record) bool { return r.Event == audit.EventConnProgress && r.Conn == conn }) {
		if r.Bytes != nil {
			down = append(down, r.Bytes.Down)
		}
	}
	if want := int(took/progressEvery) - 1; len(down) < want || !slices.IsSorted(down) || len(down) > 0 && down[len(down)-1] > longBytes() {
		c.t.Errorf("counts in between: %v, want at least %d", down, want)
	}
	c.t.Logf("%d bytes in %v, %d records in between", longBytes(), took.Round(time.Second), len(down))
}

// idleEnds waits for the end of the connection that was left alone at quiet.
func (c *cases) idleEnds(idle chan outcome, quiet time.Time) {
	if *egressFor < idleLimit {
		c.box.Exec(c.kid.Name, "/usr/bin/touch", "enough")
	}
	var o outcome
	select {
	case o = <-idle:
	case <-time.After(2 * time.Minute):
		c.t.Fatalf("an idle connection still stands after %v", time.Since(quiet))
	}
	cut := c.box.Records(func(r *audit.Record) bool {
		return r.Session == c.kid.Session && r.Event == audit.EventConnClosed && r.Reason == reason.Idle && named("echo.vendor.test")(r)
	})
	took := time.Duration(o.Took * float64(time.Second))
	if *egressFor < idleLimit {
		if o.End != "kept" || len(cut) != 0 {
			c.t.Errorf("idle for %v: %+v %+v", took, o, cut)
		}
		return
	}
	if o.End == "kept" || took < idleLimit || len(cut) != 1 {
		c.t.Errorf("idle for %v: %+v %+v", took, o, cut)
	}
	c.t.Logf("an idle connection was cut after %v", took.Round(time.Second))
}

// manyLookups: E25. What one kid asks at once is answered or refused, all of it, and another kid's lookups are answered
// meanwhile. Below its share nothing is refused: E05 to E08 ask so.
func (c *cases) manyLookups() {
	const few, whole = 3000, 10_000 // more than 1,000 at once and 500 a second
	n := atOnce(few, whole)
	other := c.box.Spawn(c.card(), nil)
	done := c.longAttack(step{Kind: "lookups", Host: c.gateway(), Port: instance.PortDNS, Count: n, Send: [][]byte{query("echo.vendor.test", typeA, classIN)}})
	var o outcome
	served := 0
	c.box.Until(2*soon, "every lookup is answered", func() error {
		if out := c.box.Exec(other.Name, "/usr/bin/getent", "ahostsv4", "files.vendor.test"); out.Exit.Code != 0 {
			c.t.Errorf("the other kid's lookup: %+v", out)
		}
		served++
		select {
		case o = <-done:
			return nil
		default:
			return fmt.Errorf("not yet; the other kid was answered %d times", served)
		}
	})
	if o.Error != "" || o.Silent != 0 || o.Served+o.Refused != n || o.Served == 0 || o.Refused == 0 {
		c.t.Fatalf("%d lookups: %+v", n, o)
	}
	c.t.Logf("%d lookups at once: %d answered, %d refused in %.1f s; meanwhile another kid was answered %d times", n, o.Served, o.Refused, o.Took, served)
	c.box.Until(soon, "the refusals are recorded", func() error {
		var sum uint64
		for _, r := range c.denied(c.kid, code(reason.RateLimit)) {
			if r.Event == audit.EventLookup {
				sum += max(r.Count, 1)
			}
		}
		if sum < uint64(o.Refused) {
			return fmt.Errorf("%d of %d", sum, o.Refused)
		}
		return nil
	})
	if out := c.attack(c.kid.Name, step{Kind: "lookup", Host: "echo.vendor.test", Port: portEcho})[0]; len(out.Addrs) != 1 {
		c.t.Errorf("the kid's own lookup afterwards: %+v", out)
	}
}
