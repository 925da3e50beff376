package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tagout/internal/reason"
)

// Proxy holds the proxy's metrics. Safe for concurrent use.
type Proxy struct {
	active       *prometheus.GaugeVec
	connections  *prometheus.CounterVec
	requests     *prometheus.CounterVec
	up, down     prometheus.Counter
	dial         *prometheus.HistogramVec
	acceptFailed prometheus.Counter
}

// NewProxy registers the proxy's metrics with r.
func NewProxy(r *Registry) *Proxy {
	f := r.with()
	bytes := f.NewCounterVec(prometheus.CounterOpts{
		Name: "tagout_proxy_upstream_bytes_total", Help: "Payload bytes exchanged with upstream servers; up is from kids.",
	}, []string{"direction"})
	return &Proxy{
		active: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tagout_proxy_connections_active", Help: "Connections of kids that are open now.",
		}, []string{"via"}),
		connections: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_proxy_connections_total", Help: "Connections judged, by outcome and reason.",
		}, []string{"via", "outcome", "reason"}),
		requests: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_proxy_requests_total", Help: "HTTP requests judged, by outcome and reason.",
		}, []string{"outcome", "reason"}),
		up: bytes.WithLabelValues("up"), down: bytes.WithLabelValues("down"),
		dial: f.NewHistogramVec(prometheus.HistogramOpts{
			Name: "tagout_proxy_dial_seconds", Help: "Time to resolve a name and connect to it.",
			Buckets: []float64{.001, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}, []string{"result"}),
		acceptFailed: f.NewCounter(prometheus.CounterOpts{
			Name: "tagout_proxy_accept_failures_total", Help: "Times accept(2) failed for want of descriptors or memory.",
		}),
	}
}

// Active counts a connection in (1) or out (-1).
func (m *Proxy) Active(via string, delta int) { m.active.WithLabelValues(via).Add(float64(delta)) }

// Connection counts a verdict about a connection.
func (m *Proxy) Connection(via, outcome string, code reason.Code) {
	m.connections.WithLabelValues(via, outcome, code.String()).Inc()
}

// Request counts a verdict about an HTTP request.
func (m *Proxy) Request(outcome string, code reason.Code) {
	m.requests.WithLabelValues(outcome, code.String()).Inc()
}

// Bytes counts payload bytes to and from upstream servers.
func (m *Proxy) Bytes(up, down int64) {
	if up > 0 {
		m.up.Add(float64(up))
	}
	if down > 0 {
		m.down.Add(float64(down))
	}
}

// Dialed counts an attempt to reach an upstream server.
func (m *Proxy) Dialed(took time.Duration, ok bool) {
	result := "ok"
	if !ok {
		result = "failed"
	}
	m.dial.WithLabelValues(result).Observe(took.Seconds())
}

// AcceptFailed counts an accept(2) that failed.
func (m *Proxy) AcceptFailed() { m.acceptFailed.Inc() }
