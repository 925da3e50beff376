package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Killswitch is killswitchd's metrics; killswitch.Metrics says when each is called.
type Killswitch struct {
	begun, ended, enforced *prometheus.CounterVec
	fired, observed        *prometheus.HistogramVec
	tags                   prometheus.Gauge
	lost                   prometheus.Counter
	leases                 prometheus.Gauge
	renewed, unrenewed     prometheus.Counter
	lamps                  *lamps
	trips                  *prometheus.CounterVec
	kidAge, kidLeft        prometheus.Gauge
	lapsed                 prometheus.Counter
}

// Killswitch makes and registers killswitchd's metrics. Call it once.
func (r *Registry) Killswitch() *Killswitch {
	f := r.with()
	counter := func(name, help, label string) *prometheus.CounterVec {
		return f.NewCounterVec(prometheus.CounterOpts{Namespace: "tagout", Subsystem: "stop", Name: name, Help: help}, []string{label})
	}
	seconds := func(name, help string) *prometheus.HistogramVec {
		return f.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "tagout", Subsystem: "stop", Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(0.0005, 2, 15),
		}, []string{"layer"})
	}
	lamps := newLamps()
	r.reg.MustRegister(lamps)
	return &Killswitch{
		lamps:    lamps,
		begun:    counter("begun_total", "Stops, by what pulled the switch.", "cause"),
		ended:    counter("ended_total", "Finished stops, by their outcome.", "state"),
		enforced: counter("enforced_total", "How often something under a tag had to be stopped again.", "layer"),
		fired:    seconds("fired_seconds", "From the order's first byte to the last point of the layer fired."),
		observed: seconds("observed_seconds", "From the order's first byte to the layer's effect seen."),
		trips: f.NewCounterVec(prometheus.CounterOpts{
			Namespace: "tagout", Subsystem: "killswitch", Name: "trips_total", Help: "Trip rules that stopped a kid, by what they are about.",
		}, []string{"rule"}),
		tags: f.NewGauge(prometheus.GaugeOpts{Namespace: "tagout", Name: "tags_hanging", Help: "Tags that hang now."}),
		lost: f.NewCounter(prometheus.CounterOpts{
			Namespace: "tagout", Subsystem: "stop", Name: "records_lost_total", Help: "Audit records dropped because the log hung.",
		}),
		kidAge:  f.NewGauge(prometheus.GaugeOpts{Namespace: "tagout", Subsystem: "kid_lease", Name: "age_seconds", Help: "Since sandboxd last renewed the lease on which the kids live."}),
		kidLeft: f.NewGauge(prometheus.GaugeOpts{Namespace: "tagout", Subsystem: "kid_lease", Name: "remaining_seconds", Help: "Until that lease runs out and the kids are stopped; 0: it has."}),
		lapsed:  f.NewCounter(prometheus.CounterOpts{Namespace: "tagout", Subsystem: "kid_lease", Name: "expired_total", Help: "Kids that were stopped because their lease ran out."}),
		leases:  f.NewGauge(prometheus.GaugeOpts{Namespace: "tagout", Subsystem: "kernel_lease", Name: "sessions", Help: "Sessions whose lease in the kernel was renewed last time."}),
		renewed: f.NewCounter(prometheus.CounterOpts{
			Namespace: "tagout", Subsystem: "kernel_lease", Name: "renewals_total", Help: "Rounds in which every lease in the kernel was renewed.",
		}),
		unrenewed: f.NewCounter(prometheus.CounterOpts{
			Namespace: "tagout", Subsystem: "kernel_lease", Name: "renewal_failures_total", Help: "Rounds in which a lease in the kernel could not be renewed.",
		}),
	}
}

func (k *Killswitch) StopBegan(cause string) { k.begun.WithLabelValues(known(cause)).Inc() }
func (k *Killswitch) StopEnded(state string) { k.ended.WithLabelValues(state).Inc() }
func (k *Killswitch) Enforced(layer string)  { k.enforced.WithLabelValues(layer).Inc() }
func (k *Killswitch) LayerFired(layer string, d time.Duration) {
	k.fired.WithLabelValues(layer).Observe(d.Seconds())
}
func (k *Killswitch) LayerObserved(layer string, d time.Duration) {
	k.observed.WithLabelValues(layer).Observe(d.Seconds())
}
func (k *Killswitch) Tripped(rule string)  { k.trips.WithLabelValues(rule).Inc() }
func (k *Killswitch) TagsHanging(n int)    { k.tags.Set(float64(n)) }
func (k *Killswitch) RecordsLost(n uint64) { k.lost.Add(float64(n)) }

// known bounds the label: a cause comes with the order and may be any text.
func known(cause string) string {
	switch cause {
	case "order", "signal", "sentinel", "trip", "lease":
		return cause
	}
	return "other"
}

func (k *Killswitch) LeasesRenewed(n int, ok bool) {
	k.leases.Set(float64(n))
	if ok {
		k.renewed.Inc()
	} else {
		k.unrenewed.Inc()
	}
}

func (k *Killswitch) KidLease(age, left time.Duration) {
	k.kidAge.Set(age.Seconds())
	k.kidLeft.Set(left.Seconds())
}
func (k *Killswitch) KidLeaseExpired(kids int) { k.lapsed.Add(float64(kids)) }
