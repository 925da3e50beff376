package credential

import (
	"cmp"
	"context"
	"slices"
	"time"

	"tagout/internal/audit"
	"tagout/internal/wire"
)

// expiryTick is how often tokens that have expired are looked for. They are refused from their time on; this is when
// requests under way that carry what they stood for are cut.
const expiryTick = time.Second

// part is one token of a holder: the index of its digest and its secret.
type part struct {
	h *holder
	i int
}

func (p part) secret() string { return p.h.secrets[p.i] }
func (p part) id() string     { return p.h.digests[p.i].id() }

// selects says whether the token is meant.
func selects(sel *wire.TokenSelection, p part) bool {
	switch {
	case sel.Kid != "":
		return p.h.kid == sel.Kid
	case sel.Session != "":
		return p.h.session == sel.Session
	case sel.ID != "":
		return p.id() == sel.ID
	}
	return sel.Secret == "" || p.secret() == sel.Secret
}

// holders returns every session's entry.
func (t *table) holders() []*holder {
	t.mu.RLock()
	defer t.mu.RUnlock()
	out := make([]*holder, 0, len(t.byMark))
	for _, h := range t.byMark {
		out = append(out, h)
	}
	return out
}

// live returns the tokens that are meant and would be found. No use waits for it for long.
func (t *table) live(sel *wire.TokenSelection) []part {
	return t.partsOf(t.holders(), func(p part) bool { return t.byMark[p.h.mark] == p.h && selects(sel, p) })
}

// partsOf returns the holders' tokens that are kept, have not expired, and match; match is called with mu held.
func (t *table) partsOf(holders []*holder, match func(part) bool) []part {
	now := t.boottime()
	var out []part
	for _, h := range holders {
		t.mu.RLock()
		for i, d := range h.digests {
			if p := (part{h, i}); t.grants[d].holder == h && (h.expires == 0 || now < h.expires) && match(p) {
				out = append(out, p)
			}
		}
		t.mu.RUnlock()
	}
	slices.SortFunc(out, func(a, b part) int {
		return cmp.Or(a.h.minted.Compare(b.h.minted), cmp.Compare(a.h.mark, b.h.mark), cmp.Compare(a.i, b.i))
	})
	return out
}

// take makes single tokens invalid; their sessions go on with the others. It returns those that were valid.
func (t *table) take(parts []part) []part {
	var taken []part
	var ids []string
	t.mu.Lock()
	for _, p := range parts {
		d := p.h.digests[p.i]
		if t.grants[d].holder == p.h {
			t.changes.Add(1)
			delete(t.grants, d)
			p.h.left--
			taken, ids = append(taken, p), append(ids, d.id())
		}
	}
	if len(ids) > 0 {
		t.told.tell(wire.Revoked{Tokens: ids})
	}
	t.mu.Unlock()
	t.settle()
	return taken
}

// expired returns the tokens whose time is over and that are still there.
func (t *table) expired() []part {
	now := t.boottime()
	t.mu.RLock()
	defer t.mu.RUnlock()
	var out []part
	for _, h := range t.byMark {
		if h.left == 0 || h.expires == 0 || now < h.expires {
			continue
		}
		for i := range h.digests {
			out = append(out, part{h, i})
		}
	}
	return out
}

// expire takes away what has expired, until ctx ends.
func (s *Service) expire(ctx context.Context) {
	tick := time.NewTicker(expiryTick)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			s.takeExpired()
			s.cfg.Metrics.Leases(s.leasing.keeper.Open())
		case <-ctx.Done():
			return
		}
	}
}

func (s *Service) takeExpired() {
	parts := s.tokens.expired()
	if len(parts) == 0 {
		return
	}
	taken := s.tokens.take(parts)
	s.cfg.Metrics.Expired(len(taken))
	s.recordTaken(taken, audit.EventTokenExpired, "", "its lifetime is over")
	s.countHeld()
}

// recordTaken writes one record a token, and ends what was leased for it: the issuer is asked after the acknowledgement.
func (s *Service) recordTaken(taken []part, event, actor, why string) {
	for _, p := range taken {
		s.leasing.keeper.End(p.h.session, p.secret())
		s.cfg.Audit.Log(audit.Record{Event: event, Session: p.h.session, Kid: p.h.kid, Card: p.h.card, Mark: p.h.mark, Actor: actor,
			Outcome: audit.OutcomeOK, Detail: why, Fields: map[string]string{"token_id": p.id(), "secret": p.secret()}})
		s.leasing.keeper.End(p.h.session, p.secret())
	}
}

// info describes tokens for people: when they expire is given by today's wall clock.
func (s *Service) info(parts []part) []wire.TokenInfo {
	now, boot := time.Now(), s.cfg.Boottime()
	out := make([]wire.TokenInfo, len(parts))
	for i, p := range parts {
		out[i] = wire.TokenInfo{ID: p.id(), Secret: p.secret(), Kid: p.h.kid, Session: p.h.session, Card: p.h.card, Mark: p.h.mark, Minted: p.h.minted}
		if p.h.expires != 0 {
			out[i].Left = max(p.h.expires-boot, 0)
			out[i].Expires = now.Add(out[i].Left).Round(time.Second)
		}
	}
	return out
}
