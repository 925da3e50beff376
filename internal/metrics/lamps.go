package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Lamps are the lamps of the stop layers.
type Lamps struct {
	Layers []Lamp
	Every  time.Duration // period of proofs
}

// Lamp is one layer's.
type Lamp struct {
	Layer    string
	Armed    bool          // not degraded
	ProofAge time.Duration // of the last proof that was carried out; where there was none, of killswitchd
}

// lamps is a collector: ages and lamps are asked for when somebody looks.
type lamps struct {
	ask               func() Lamps // nil until Show
	armed, age, every *prometheus.Desc
}

func newLamps() *lamps {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("tagout_killswitch_"+name, help, labels, nil)
	}
	return &lamps{
		armed: desc("armed", "1 while the layer could fire and its last proof passed and is not old, else 0.", "layer"),
		age:   desc("proof_age_seconds", "Age of the layer's last proof; before the first, how long killswitchd has been running.", "layer"),
		every: desc("proof_period_seconds", "From one proof to the next."),
	}
}

// Show makes ask the source of the lamps' metrics. Call it once, before they are served.
func (k *Killswitch) Show(ask func() Lamps) { k.lamps.ask = ask }

func (l *lamps) Describe(ch chan<- *prometheus.Desc) { ch <- l.armed; ch <- l.age; ch <- l.every }

func (l *lamps) Collect(ch chan<- prometheus.Metric) {
	if l.ask == nil {
		return
	}
	now := l.ask()
	for _, lamp := range now.Layers {
		on := 0.0
		if lamp.Armed {
			on = 1
		}
		ch <- prometheus.MustNewConstMetric(l.armed, prometheus.GaugeValue, on, lamp.Layer)
		ch <- prometheus.MustNewConstMetric(l.age, prometheus.GaugeValue, lamp.ProofAge.Seconds(), lamp.Layer)
	}
	ch <- prometheus.MustNewConstMetric(l.every, prometheus.GaugeValue, now.Every.Seconds())
}
