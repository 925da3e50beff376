package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// AuditLog registers what a daemon's own log counts; ask is called at each scrape.
func (r *Registry) AuditLog(ask func() (records, bytes, lost, syncs uint64)) {
	counter := func(name, help string, value func() uint64) {
		r.with().NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 { return float64(value()) })
	}
	counter("tagout_audit_records_total", "Records that this process wrote to its audit log.", func() uint64 { n, _, _, _ := ask(); return n })
	counter("tagout_audit_bytes_total", "Bytes of these records.", func() uint64 { _, n, _, _ := ask(); return n })
	counter("tagout_audit_lost_total", "Records that found no room because the disk did not keep up; a gap record tells of them.", func() uint64 { _, _, n, _ := ask(); return n })
	counter("tagout_audit_syncs_total", "Times that the log was put on disk, each for all who waited.", func() uint64 { _, _, _, n := ask(); return n })
}

// AuditKeep counts what sandboxd does for all audit logs.
type AuditKeep struct {
	free, total prometheus.Gauge
	oldest      *prometheus.GaugeVec
	witnessed   *prometheus.CounterVec
}

// NewAuditKeep registers its metrics in r.
func NewAuditKeep(r *Registry) *AuditKeep {
	f := r.with()
	return &AuditKeep{
		free:      f.NewGauge(prometheus.GaugeOpts{Name: "tagout_audit_disk_free_bytes", Help: "Free bytes of the disk of the audit logs."}),
		total:     f.NewGauge(prometheus.GaugeOpts{Name: "tagout_audit_disk_bytes", Help: "Size of the disk of the audit logs."}),
		oldest:    f.NewGaugeVec(prometheus.GaugeOpts{Name: "tagout_audit_oldest_seconds", Help: "Age of the oldest closed piece of a log."}, []string{"log"}),
		witnessed: f.NewCounterVec(prometheus.CounterOpts{Name: "tagout_audit_witness_total", Help: "Checkpoints for a witness: ok, fail (tried again unless it refused), dropped."}, []string{"witness", "outcome"}),
	}
}

// AuditFree sets the disk's room.
func (k *AuditKeep) AuditFree(free, total uint64) {
	k.free.Set(float64(free))
	k.total.Set(float64(total))
}

// AuditOldest sets the age of a log's oldest closed piece.
func (k *AuditKeep) AuditOldest(daemon string, age time.Duration) {
	k.oldest.WithLabelValues(daemon).Set(age.Seconds())
}

// Witnessed adds one checkpoint for a witness.
func (k *AuditKeep) Witnessed(witness, outcome string) {
	k.witnessed.WithLabelValues(witness, outcome).Inc()
}
