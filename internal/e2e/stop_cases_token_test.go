package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// aThousandUses (S11): a token that was taken out of the box is used a thousand times a second while the credential
// layer alone is fired, and the kid itself uses it through the proxy. No use that begins after the
// acknowledgement is accepted, on either road: nothing caches.
func (s *stopCases) aThousandUses() {
	kid := s.spawn("token")
	running(s.t, s.box, kid.Name, "/workspace/hostile", "agent", "-parts", "ticks,token", "-tag", kid.Name, "-uses", "100")
	loop := running(s.t, s.box, kid.Name, "sh", "-c", "until /workspace/hostile whoami https://api.vendor.test/v1/whoami 2>&1 | grep placed; do :; done")
	var token string
	s.until("the token has left the box and is accepted", func() error {
		token = s.box.Net.Sink.Token(kid.Name)
		if n := s.box.Net.API.Uses.Tally("agent:" + kid.Name).Accepted; token == "" || n < 5 {
			return fmt.Errorf("token %q, accepted %d times", token, n)
		}
		return nil
	})
	began := practice.Now()
	u := practice.UseToken(context.Background(), s.box.Inst.Socket(instance.Credd), token, 1000)
	defer u.Stop()
	s.until("the token is used a thousand times", func() error {
		if n := u.Seen().Answered; n < 1000 {
			return fmt.Errorf("%d times", n)
		}
		return nil
	})
	used := u.Seen().Answered
	rate := float64(used) / (practice.Now() - began).Seconds()
	rep := s.stop(kid.Name, wire.LayerCredential)
	acked := practice.Now()
	s.observed(rep)
	kidsBefore := s.box.Net.API.Uses.Tally("agent:" + kid.Name)
	n := u.Seen().Answered
	s.until("a thousand uses more", func() error {
		if now := u.Seen().Answered; now < n+1000 {
			return fmt.Errorf("%d after %d", now, n)
		}
		return nil
	})
	last := u.Seen().Asked
	s.t.Logf("%.0f uses a second; the last that was accepted began %v before the acknowledgement", rate, acked-last)
	if last >= acked {
		s.t.Errorf("a use that began %v after the acknowledgement was accepted", last-acked)
	}
	s.until("the kid's own uses are refused, and the record says whose tag it is", func() error {
		said := s.denied(kid, code(reason.Tagged))
		if len(said) == 0 {
			return errors.New("not once yet")
		}
		for _, part := range []string{rep.Stop, practice.Authority, s.t.Name()} {
			if !strings.Contains(said[0].Detail, part) {
				s.t.Errorf("%q does not say %q", said[0].Detail, part)
			}
		}
		return nil
	})
	if out := wait(s.t, "the kid's loop", loop); !strings.Contains(string(out.Stdout)+string(out.Stderr), rep.Stop) {
		s.t.Errorf("the kid was not told of the tag: %+v", out)
	}
	// One request may have been on its way from the proxy to the API.
	if after := s.box.Net.API.Uses.Tally("agent:" + kid.Name); after.Accepted > kidsBefore.Accepted+1 {
		s.t.Errorf("the kid's own token was accepted %d times after the acknowledgement", after.Accepted-kidsBefore.Accepted)
	}
	if len(s.pids(kid)) == 0 {
		s.t.Error("the credential layer killed the kid")
	}
}
