package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// drillAge reads the age at each scrape, because it grows by itself.
type drillAge struct {
	desc *prometheus.Desc
	last func() (time.Time, bool)
}

// Drills serves the age of the last whole drill that passed; last says when it was started, and false where there is
// none, which is then served as nothing. It may be called by any goroutine. Call Drills once.
func (r *Registry) Drills(last func() (time.Time, bool)) {
	r.reg.MustRegister(&drillAge{last: last, desc: prometheus.NewDesc("tagout_drill_last_passed_age_seconds",
		"Seconds since the start of the last whole drill on this machine that passed, by the wall clock.", nil, nil)})
}

func (d *drillAge) Describe(ch chan<- *prometheus.Desc) { ch <- d.desc }

func (d *drillAge) Collect(ch chan<- prometheus.Metric) {
	if at, ok := d.last(); ok {
		ch <- prometheus.MustNewConstMetric(d.desc, prometheus.GaugeValue, time.Since(at).Seconds())
	}
}
