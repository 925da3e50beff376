// Package metrics is the only package that knows Prometheus. Each daemon package declares the small
// interface that it reports to; this package has one struct a daemon that fulfils it.
package metrics

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Registry is one daemon's own metrics registry; nothing is ever registered globally.
type Registry struct{ reg *prometheus.Registry }

// NewRegistry returns a registry with the Go and process collectors and tagout_build_info.
func NewRegistry(instance, daemon string) *Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	promauto.With(reg).NewGaugeVec(prometheus.GaugeOpts{
		Name: "tagout_daemon_info", Help: "Always 1; says which daemon of which instance this is.",
	}, []string{"instance_name", "daemon"}).WithLabelValues(instance, daemon).Set(1)
	return &Registry{reg: reg}
}

// Handler serves the registry in Prometheus' text format.
func (r *Registry) Handler() http.Handler {
	return promhttp.HandlerFor(r.reg, promhttp.HandlerOpts{})
}

// with returns the factory that the daemons' structs in this package make their metrics with.
func (r *Registry) with() promauto.Factory { return promauto.With(r.reg) }
