package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"tagout/internal/reason"
)

// DNSFilter counts what dnsfilter does. Make one with NewDNSFilter.
type DNSFilter struct {
	answered, dropped *prometheus.CounterVec
	sessions          prometheus.Gauge
	udpOK             prometheus.Counter // of answered, looked up once: nearly all there is
}

// NewDNSFilter registers dnsfilter's metrics in r.
func NewDNSFilter(r *Registry) *DNSFilter {
	f := r.with()
	d := &DNSFilter{
		answered: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_dnsfilter_queries_total", Help: "Messages answered; reason ok is an allowed lookup."}, []string{"proto", "reason"}),
		dropped: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_dnsfilter_dropped_total", Help: "Messages that got no answer: too short, cut off, or answers themselves."}, []string{"proto"}),
		sessions: f.NewGauge(prometheus.GaugeOpts{
			Name: "tagout_dnsfilter_sessions", Help: "Sessions whose policy is loaded."}),
	}
	d.udpOK = d.answered.WithLabelValues("udp", reason.OK.String())
	return d
}

// Answered adds one message that was answered.
func (d *DNSFilter) Answered(proto string, code reason.Code) {
	if proto == "udp" && code == reason.OK {
		d.udpOK.Inc()
		return
	}
	d.answered.WithLabelValues(proto, code.String()).Inc()
}

// Dropped adds one message that was not answered.
func (d *DNSFilter) Dropped(proto string) { d.dropped.WithLabelValues(proto).Inc() }

// Sessions sets how many sessions are loaded.
func (d *DNSFilter) Sessions(n int) { d.sessions.Set(float64(n)) }
