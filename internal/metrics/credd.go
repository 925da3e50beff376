package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tagout/internal/reason"
	"tagout/internal/wire"
)

// Credd counts what credd does. Make one with NewCredd.
type Credd struct {
	minted, issued, forgotten, revocations, expired prometheus.Counter
	used, mintRefused                               *prometheus.CounterVec
	revokeSeconds                                   prometheus.Histogram
	leases                                          *prometheus.GaugeVec
	sessions, tokens, secrets                       prometheus.Gauge
}

// NewCredd registers credd's metrics in r.
func NewCredd(r *Registry) *Credd {
	f := r.with()
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return f.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	return &Credd{
		minted:      counter("tagout_credd_tokens_minted_total", "Tokens given to sessions."),
		issued:      counter("tagout_credd_jwts_issued_total", "JWTs made for services of the user's own."),
		forgotten:   counter("tagout_credd_tokens_revoked_total", "Tokens forgotten by revocations."),
		expired:     counter("tagout_credd_tokens_expired_total", "Tokens whose lifetime was over."),
		revocations: counter("tagout_credd_revocations_total", "Revocations acknowledged."),
		used: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_credd_token_uses_total", Help: "Decisions about a token; reason ok is an acceptance."}, []string{"reason"}),
		mintRefused: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_credd_mint_refusals_total", Help: "Sessions whose tokens were refused."}, []string{"reason"}),
		revokeSeconds: f.NewHistogram(prometheus.HistogramOpts{
			Name: "tagout_credd_revoke_seconds", Help: "Time from a revocation's request to its acknowledgement.",
			Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25}}),
		leases: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tagout_credd_leases", Help: "Leased secrets that a provider may take; still-valid and unknown are those that it should not."}, []string{"state"}),
		sessions: gauge("tagout_credd_sessions", "Sessions that hold tokens or could be revoked."),
		tokens:   gauge("tagout_credd_tokens", "Tokens that would be accepted."),
		secrets:  gauge("tagout_credd_secrets", "Secrets in the vault."),
	}
}

// Minted adds tokens that were given out.
func (c *Credd) Minted(tokens int) { c.minted.Add(float64(tokens)) }

// Issued adds one JWT that was made.
func (c *Credd) Issued() { c.issued.Inc() }

// Used adds one decision about a token.
func (c *Credd) Used(code reason.Code) { c.used.WithLabelValues(code.String()).Inc() }

// MintRefused adds one session whose tokens were refused.
func (c *Credd) MintRefused(code reason.Code) { c.mintRefused.WithLabelValues(code.String()).Inc() }

// Revoked adds one revocation.
func (c *Credd) Revoked(tokens int, took time.Duration) {
	c.revocations.Inc()
	c.forgotten.Add(float64(tokens))
	c.revokeSeconds.Observe(took.Seconds())
}

// Expired adds tokens whose lifetime was over.
func (c *Credd) Expired(tokens int) { c.expired.Add(float64(tokens)) }

// Held sets what is held now.
func (c *Credd) Held(sessions, tokens, secrets int) {
	c.sessions.Set(float64(sessions))
	c.tokens.Set(float64(tokens))
	c.secrets.Set(float64(secrets))
}

// Leases sets how many leased secrets providers may take, by state.
func (c *Credd) Leases(open map[wire.LeaseState]int) {
	for _, state := range []wire.LeaseState{wire.LeaseMinting, wire.LeaseHeld, wire.LeaseRevoking, wire.LeaseValid, wire.LeaseUnknown} {
		c.leases.WithLabelValues(string(state)).Set(float64(open[state]))
	}
}
