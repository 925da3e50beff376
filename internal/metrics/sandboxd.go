package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tagout/internal/reason"
)

// Sandboxd counts what sandboxd does. Make one with NewSandboxd.
type Sandboxd struct {
	spawns, stages, steps           *prometheus.HistogramVec
	destroyed, denied               *prometheus.CounterVec
	execs                           *prometheus.HistogramVec
	lost, oom                       prometheus.Counter
	alerts, alertErr, alertDrop     *prometheus.CounterVec
	alertWait                       *prometheus.GaugeVec
	streamed, streamErr, streamDrop *prometheus.CounterVec
	streamWait                      *prometheus.GaugeVec
	gaps                            *prometheus.CounterVec
	recorded, folded                *prometheus.CounterVec
	kids                            prometheus.Gauge
	leases                          *prometheus.CounterVec
	silent                          prometheus.Gauge
}

// NewSandboxd registers sandboxd's metrics in r.
func NewSandboxd(r *Registry) *Sandboxd {
	f := r.with()
	short := []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, 1}
	seconds := []float64{.005, .01, .025, .05, .1, .15, .25, .5, 1, 2.5, 5, 10}
	return &Sandboxd{
		spawns: f.NewHistogramVec(prometheus.HistogramOpts{
			Name: "tagout_sandboxd_spawn_seconds", Help: "Time from a spawn's request to its answer.", Buckets: seconds}, []string{"outcome"}),
		stages: f.NewHistogramVec(prometheus.HistogramOpts{
			Name: "tagout_sandboxd_spawn_stage_seconds", Help: "Time that a spawn waited for each of its stages, and for its first command.",
			Buckets: short}, []string{"stage"}),
		steps: f.NewHistogramVec(prometheus.HistogramOpts{
			Name: "tagout_sandboxd_spawn_step_seconds", Help: "Time that each step of a spawn took; some run beside each other.",
			Buckets: short}, []string{"step"}),
		destroyed: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_sandboxd_destroys_total", Help: "Destroyed kids; outcome fail means that something is still being removed."}, []string{"outcome"}),
		oom: f.NewCounter(prometheus.CounterOpts{
			Name: "tagout_sandboxd_kids_out_of_memory_total", Help: "Kids that used all their memory and were killed for it."}),
		denied: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_sandboxd_denials_total", Help: "Attempts that the kernel denied."}, []string{"reason"}),
		execs: f.NewHistogramVec(prometheus.HistogramOpts{
			Name: "tagout_sandboxd_exec_seconds", Help: "Time that commands ran.", Buckets: []float64{.01, .05, .1, .5, 1, 10, 60, 600}}, []string{"result"}),
		lost: f.NewCounter(prometheus.CounterOpts{
			Name: "tagout_sandboxd_denials_lost_total", Help: "Denials that found the kernel's event ring full; a flood's records have their number."}),
		alerts: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_sandboxd_alerts_sent_total", Help: "Alerts that a receiver took, summaries of repeats among them."}, []string{"sink"}),
		alertErr: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_sandboxd_alert_failures_total", Help: "Attempts to send an alert that failed; each is tried again."}, []string{"sink"}),
		alertDrop: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_sandboxd_alerts_dropped_total", Help: "Denied attempts that a receiver will never be told of: its queue was full, or it refused them."}, []string{"sink"}),
		alertWait: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tagout_sandboxd_alert_queue", Help: "Alerts that wait for a receiver, the one being sent among them."}, []string{"sink"}),
		streamed: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_sandboxd_stream_sent_total", Help: "Audit records that a receiver of all records took."}, []string{"sink"}),
		streamErr: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_sandboxd_stream_failures_total", Help: "Attempts to send audit records that failed; each is tried again."}, []string{"sink"}),
		streamDrop: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_sandboxd_stream_dropped_total", Help: "Audit records that a receiver will not get: its queue was full and it took nothing, or it refused them."}, []string{"sink"}),
		streamWait: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tagout_sandboxd_stream_queue", Help: "Audit records that wait in memory for a receiver of all records."}, []string{"sink"}),
		gaps: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_sandboxd_audit_gaps_total", Help: "Records that are missing from a daemon's audit log; a gap record tells of them."}, []string{"log"}),
		recorded: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_sandboxd_recorded_events_total", Help: "Programs that kids started and files that they created, changed, renamed or deleted; each is in a record."}, []string{"kind"}),
		folded: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_sandboxd_folded_events_total", Help: "Those among the recorded events that have no record of their own: a kid did more than is recorded one by one, and they stand in a record's count."}, []string{"kind"}),
		leases: f.NewCounterVec(prometheus.CounterOpts{
			Name: "tagout_sandboxd_lease_renewals_total", Help: "Attempts to renew the kids' lease; outcome fail: something is not well, or killswitchd did not take it."}, []string{"outcome"}),
		silent: f.NewGauge(prometheus.GaugeOpts{
			Name: "tagout_sandboxd_killswitchd_silent_seconds", Help: "Since killswitchd last answered; the kids are killed when it reaches the term `absent`."}),
		kids: f.NewGauge(prometheus.GaugeOpts{Name: "tagout_sandboxd_kids", Help: "Kids, whatever state they are in."}),
	}
}

// Spawned adds one spawn with its outcome.
func (s *Sandboxd) Spawned(outcome string, took time.Duration) {
	s.spawns.WithLabelValues(outcome).Observe(took.Seconds())
}

// SpawnStage adds one stage of a spawn, or a kid's first command.
func (s *Sandboxd) SpawnStage(stage string, took time.Duration) {
	s.stages.WithLabelValues(stage).Observe(took.Seconds())
}

// SpawnStep adds one step of a spawn.
func (s *Sandboxd) SpawnStep(step string, took time.Duration) {
	s.steps.WithLabelValues(step).Observe(took.Seconds())
}

// Destroyed adds one destroy.
func (s *Sandboxd) Destroyed(outcome string) { s.destroyed.WithLabelValues(outcome).Inc() }

// OutOfMemory adds one kid that ran out of memory.
func (s *Sandboxd) OutOfMemory() { s.oom.Inc() }

// ExecEnded adds one command.
func (s *Sandboxd) ExecEnded(result string, took time.Duration) {
	s.execs.WithLabelValues(result).Observe(took.Seconds())
}

// Kids sets how many kids there are.
func (s *Sandboxd) Kids(n int) { s.kids.Set(float64(n)) }

// Denied adds n denials by the kernel.
func (s *Sandboxd) Denied(code reason.Code, n uint64) {
	s.denied.WithLabelValues(code.String()).Add(float64(n))
}

// DenialsLost adds denials that the kernel could not hand over one by one.
func (s *Sandboxd) DenialsLost(n uint64) { s.lost.Add(float64(n)) }

// AlertSent adds one alert that was delivered.
func (s *Sandboxd) AlertSent(sink string) { s.alerts.WithLabelValues(sink).Inc() }

// AlertFailed adds one attempt to deliver an alert that failed.
func (s *Sandboxd) AlertFailed(sink string) { s.alertErr.WithLabelValues(sink).Inc() }

// AlertsDropped adds n denied attempts that a receiver will never be told of.
func (s *Sandboxd) AlertsDropped(sink string, n uint64) {
	s.alertDrop.WithLabelValues(sink).Add(float64(n))
}

// AlertsWaiting sets how many alerts wait for a receiver.
func (s *Sandboxd) AlertsWaiting(sink string, alerts int) {
	s.alertWait.WithLabelValues(sink).Set(float64(alerts))
}

// StreamSent adds n records that a receiver of all records took.
func (s *Sandboxd) StreamSent(sink string, n int) {
	s.streamed.WithLabelValues(sink).Add(float64(n))
}

// StreamFailed adds one attempt to send records that failed.
func (s *Sandboxd) StreamFailed(sink string) { s.streamErr.WithLabelValues(sink).Inc() }

// StreamDropped adds n records that a receiver will never get.
func (s *Sandboxd) StreamDropped(sink string, n uint64) {
	s.streamDrop.WithLabelValues(sink).Add(float64(n))
}

// StreamWaiting sets how many records wait in memory for a receiver.
func (s *Sandboxd) StreamWaiting(sink string, n int) {
	s.streamWait.WithLabelValues(sink).Set(float64(n))
}

// Recorded adds n events of a kind, of which folded have no record of their own.
func (s *Sandboxd) Recorded(kind string, n, folded uint64) {
	s.recorded.WithLabelValues(kind).Add(float64(n))
	s.folded.WithLabelValues(kind).Add(float64(folded))
}

// AuditGap adds records that are missing from a daemon's audit log.
func (s *Sandboxd) AuditGap(daemon string, n uint64) { s.gaps.WithLabelValues(daemon).Add(float64(n)) }

// LeaseRenewed adds one attempt to renew the kids' lease.
func (s *Sandboxd) LeaseRenewed(ok bool) {
	outcome := "ok"
	if !ok {
		outcome = "fail"
	}
	s.leases.WithLabelValues(outcome).Inc()
}

// SwitchSilent sets how long ago killswitchd last answered.
func (s *Sandboxd) SwitchSilent(age time.Duration) { s.silent.Set(age.Seconds()) }
