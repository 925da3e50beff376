package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"tagout/internal/control"
	"tagout/internal/drill"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// CredentialsConfig says what to measure credentials with. All fields must be set.
type CredentialsConfig struct {
	Inst     instance.Instance // set up and running, with vendor_api in the vault
	InputDir string            // holds the hostile binary
	Dir      string            // where credentials.json is written
	Out      io.Writer
	Requests int // with a secret, and as many without
	Tokens   int // live at once, a session each
	Revokes  int // sessions that are revoked one by one; fewer than Tokens
	Rate     int // uses of tokens a second meanwhile
	Kill     int // sessions that are revoked at once
	Kills    int // how often
}

// The secret that the tokens stand for, and the host that it is bound to, in every practice box.
const (
	benchSecret = "vendor_api"
	benchHost   = "api.vendor.test"
)

// Targets, in milliseconds but for the memory.
const (
	mostTokensMB = 30
	mostRevoke   = 5
	mostKill     = 100
)

// credentials is one run of the benchmark.
type credentials struct {
	CredentialsConfig
	box    drill.Box
	credd  *control.Client
	redis  *redis // nil where it is not installed
	tokens []string
	marks  []uint32 // of tokens
	next   uint32   // index of the next session
}

// RunCredentials measures and writes what credentials cost, in credd itself: live tokens' memory, and revocations while
// tokens are used, beside Redis as the store of what is valid where it is installed.
func RunCredentials(ctx context.Context, c CredentialsConfig) (metrics []Metric, err error) {
	r := &credentials{CredentialsConfig: c, box: drill.Sockets(c.Inst, nil), credd: control.NewClient(c.Inst.Socket(instance.Credd))}
	defer r.credd.CloseIdle()
	if r.redis, err = newRedis(ctx, c.Inst); err != nil {
		return nil, fmt.Errorf("measuring credentials: starting redis: %w", err)
	}
	if r.redis == nil {
		fmt.Fprintln(c.Out, "redis-server is not installed: its figures are left out")
	} else {
		defer func() { err = errors.Join(err, r.redis.close()) }()
	}
	return measure(ctx, c.Out, c.Dir, "credentials", []part{
		{"injection", r.injection}, {"live tokens", r.live}, {"revocations", r.revocations}, {"revocations of everything", r.kills}, {"a stop of the box", r.stop},
	})
}

// mint makes n sessions with a token each.
func (r *credentials) mint(ctx context.Context, n int) error {
	type minted struct {
		mark  uint32
		token string
		err   error
	}
	const atOnce = 8
	got := make(chan minted, n)
	first := r.next
	r.next += uint32(n) // counts are small
	for w := range atOnce {
		go func() {
			for i := w; i < n; i += atOnce {
				seq := first + uint32(i) + 1<<16 // far from real kids' sessions
				req := wire.MintRequest{Kid: fmt.Sprintf("bench-%d", seq), Session: fmt.Sprintf("01BENCH%d", seq), Card: "bench",
					Mark: r.Inst.SessionMark(seq), Secrets: []wire.MintSecret{{Name: benchSecret}}}
				var reply wire.MintReply
				err := r.credd.Call(ctx, http.MethodPost, "/v1/sessions", req, &reply)
				got <- minted{req.Mark, reply.Tokens[benchSecret], err}
			}
		}()
	}
	for range n {
		m := <-got
		if m.err != nil {
			return m.err
		}
		r.tokens, r.marks = append(r.tokens, m.token), append(r.marks, m.mark)
	}
	return nil
}

// live measures how much credd's resident memory grows by tokens, each of a session of its own.
func (r *credentials) live(ctx context.Context) ([]Metric, error) {
	fmt.Fprintf(r.Out, "minting %d tokens\n", r.Tokens)
	// What the first requests and records cost once, such as the rules that records are searched by, is no token's cost.
	if err := r.mint(ctx, max(r.Tokens/5, 1)); err != nil {
		return nil, err
	}
	if err := r.credd.Call(ctx, http.MethodPost, "/v1/revoke", wire.RevokeRequest{All: true}, nil); err != nil {
		return nil, err
	}
	r.tokens, r.marks = nil, nil
	before, err := r.settled(ctx)
	if err != nil {
		return nil, err
	}
	if err := r.mint(ctx, r.Tokens); err != nil {
		return nil, err
	}
	peak, err := r.creddMemory()
	if err != nil {
		return nil, err
	}
	after, err := r.settled(ctx)
	if err != nil {
		return nil, err
	}
	m := AtMost(fmt.Sprintf("memory of %d live tokens, growth of credd", r.Tokens), max(after-before, 0), "MB", mostTokensMB)
	while := AtMost("the same, while they are minted", max(peak-before, 0), "MB", 0)
	if r.redis != nil {
		empty, err := r.redis.memory()
		if err == nil {
			err = r.redis.fill(r.tokens)
		}
		if err != nil {
			return nil, err
		}
		full, err := r.redis.memory()
		if err != nil {
			return nil, err
		}
		m = m.Beside(peerRedis, max(full-empty, 0))
	}
	if !m.Met {
		m.Limits = "garbage of the requests that minted them, which is collected seldom so that no revocation waits for it"
	}
	return []Metric{m, while}, nil
}

// revocations measures single sessions' revocations while tokens are used.
func (r *credentials) revocations(ctx context.Context) ([]Metric, error) {
	fmt.Fprintf(r.Out, "revoking %d of %d sessions one by one at %d uses a second\n", r.Revokes, r.Tokens, r.Rate)
	revoke := func(i int) error {
		return r.credd.Call(ctx, http.MethodPost, "/v1/revoke", wire.RevokeRequest{Marks: []uint32{r.marks[i]}}, nil)
	}
	took, uses, err := underUse(ctx, r.Rate, r.Revokes, r.use(r.tokens[r.Revokes:]), revoke)
	if err != nil {
		return nil, err
	}
	p50, p99 := AtMost(revokeName(r, "p50"), Percentile(took, 50), "ms", mostRevoke), AtMost(revokeName(r, "p99"), Percentile(took, 99), "ms", mostRevoke)
	used := AtMost("use of a token meanwhile, p50", Percentile(uses, 50), "ms", 0)
	if !p99.Met {
		p99.Limits = "the scheduler, where other programs use the processors: p99 of uses meanwhile was " + fmt.Sprintf("%.1f ms", Percentile(uses, 99))
	}
	if r.redis != nil {
		del := func(i int) error { return r.redis.call("DEL", r.tokens[i]) }
		theirs, theirUses, err := underUse(ctx, r.Rate, r.Revokes, r.redis.uses(r.tokens[r.Revokes:]), del)
		if err != nil {
			return nil, err
		}
		p50, p99 = p50.Beside(peerRedis, Percentile(theirs, 50)), p99.Beside(peerRedis, Percentile(theirs, 99))
		used = used.Beside(peerRedis, Percentile(theirUses, 50))
	}
	r.tokens, r.marks = r.tokens[r.Revokes:], r.marks[r.Revokes:]
	return []Metric{p50, p99, used}, nil
}

func revokeName(r *credentials, which string) string {
	return fmt.Sprintf("revoke one session of %d at %d uses/s, %s", r.Tokens, r.Rate, which)
}

// kills measures revocations of every session there is, beside Redis emptying itself of as many keys.
func (r *credentials) kills(ctx context.Context) ([]Metric, error) {
	fmt.Fprintf(r.Out, "revoking %d sessions at once, %d times\n", r.Kill, r.Kills)
	var ours, theirs []time.Duration
	for range r.Kills {
		if err := r.onlyKill(ctx); err != nil {
			return nil, err
		}
		began := time.Now()
		var reply wire.RevokeReply
		if err := r.credd.Call(ctx, http.MethodPost, "/v1/revoke", wire.RevokeRequest{All: true}, &reply); err != nil {
			return nil, err
		}
		ours = append(ours, time.Since(began))
		if reply.Revoked < r.Kill {
			return nil, fmt.Errorf("only %d tokens were revoked", reply.Revoked)
		}
		if r.redis == nil {
			continue
		}
		if err := errors.Join(r.redis.call("FLUSHDB"), r.redis.fill(r.tokens)); err != nil {
			return nil, err
		}
		began = time.Now()
		if err := r.redis.call("FLUSHDB"); err != nil {
			return nil, err
		}
		theirs = append(theirs, time.Since(began))
	}
	m := AtMost(fmt.Sprintf("revoke all of %d sessions, slowest of %d", r.Kill, r.Kills), Percentile(ours, 100), "ms", mostKill)
	if len(theirs) > 0 {
		m = m.Beside(peerRedis, Percentile(theirs, 100))
	}
	return []Metric{m}, nil
}

// onlyKill leaves exactly Kill sessions, all of them new.
func (r *credentials) onlyKill(ctx context.Context) error {
	if err := r.credd.Call(ctx, http.MethodPost, "/v1/revoke", wire.RevokeRequest{All: true}, nil); err != nil {
		return err
	}
	r.tokens, r.marks = nil, nil
	return r.mint(ctx, r.Kill)
}

// stop measures the stop of the whole box's credential layer as an operator orders it, from the order to killswitchd's
// word that credd's tokens are gone, and to the start of the last use that was accepted. It leaves a tag.
func (r *credentials) stop(ctx context.Context) ([]Metric, error) {
	fmt.Fprintf(r.Out, "stopping the credential layer of the whole box with %d sessions\n", r.Kill)
	if err := r.onlyKill(ctx); err != nil {
		return nil, err
	}
	u := newUsers(ctx, r.Rate, r.use(r.tokens))
	if err := u.started(); err != nil {
		return nil, err
	}
	began := time.Now()
	var acknowledged time.Duration
	rep, err := r.box.Stop(ctx, wire.StopRequest{Scope: wire.Scope{All: true}, Layers: []wire.Layer{wire.LayerCredential}, By: "Ada Operator", Reason: "a measurement"}, func(ev wire.StopEvent) {
		if ev.Layer == wire.LayerCredential && ev.Point == "credd" && ev.State == wire.StateObserved {
			acknowledged = time.Since(began)
		}
	})
	last := u.end()
	switch {
	case err != nil:
		return nil, err
	case acknowledged == 0:
		return nil, fmt.Errorf("credd's tokens were not seen to go: %+v", rep)
	}
	at := 0.0
	if after := last.Sub(began); after > 0 {
		at = float64(after) / float64(time.Millisecond)
	}
	return []Metric{
		AtMost(fmt.Sprintf("stop of the box's credential layer, %d sessions: order to acknowledgement", r.Kill), Percentile([]time.Duration{acknowledged}, 100), "ms", mostKill),
		AtMost("the same: order to the start of the last use that was accepted", at, "ms", mostKill),
	}, nil
}
