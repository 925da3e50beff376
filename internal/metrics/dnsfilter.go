package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"tagout/internal/reason"
)

// DNSFilter counts what dnsfilter does. Make one with NewDNSFilter.
type DNSFilter struct {
	answered, dropped *prometheus.CounterVec
	sessions          prometheus.Gauge
}

// NewDNSFilter registers dnsfilter's metrics in r.
func NewDNSFilter(r *Registry) *DNSFilter {
	f := r.with()
	return &DNSFilter{
		answered: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_dnsfilter_queries_total", Help: "Messages answered; reason ok is an allowed lookup."}, []string{"proto", "reason"}),
		dropped: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_dnsfilter_dropped_total", Help: "Messages that got no answer: too short, cut off, or answers themselves."}, []string{"proto"}),
		sessions: f.NewGauge(prometheus.GaugeOpts{
			Name: "tagout_dnsfilter_sessions", Help: "Sessions whose policy is loaded."}),
	}
}

// Answered adds one message that was answered.
func (d *DNSFilter) Answered(proto string, code reason.Code) {
	d.answered.WithLabelValues(proto, code.String()).Inc()
}

// Dropped adds one message that was not answered.
func (d *DNSFilter) Dropped(proto string) { d.dropped.WithLabelValues(proto).Inc() }

// Sessions sets how many sessions are loaded.
func (d *DNSFilter) Sessions(n int) { d.sessions.Set(float64(n)) }
