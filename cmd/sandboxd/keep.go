package main

import (
	"path/filepath"
	"time"

	"tagout/internal/config"
	"tagout/internal/daemon"
	"tagout/internal/instance"
	"tagout/internal/metrics"
	"tagout/sandboxd/auditkeep"
)

// keeper returns what looks after the audit logs, as the box's configuration says.
func keeper(d *daemon.Daemon) (*auditkeep.Keeper, error) {
	a := d.Box.Audit
	policies := map[string]auditkeep.WhenFull{"": auditkeep.LeaveKids, config.FullNothing: auditkeep.LeaveKids, config.FullFreeze: auditkeep.FreezeKids, config.FullStop: auditkeep.StopKids}
	cfg := auditkeep.Config{
		Dir: d.Inst.AuditDir(), State: filepath.Join(d.Inst.StateDir(), instance.Sandboxd),
		Retention: time.Duration(a.Days()) * 24 * time.Hour, Recipients: a.Recipients,
		Space: auditkeep.Space{Warn: uint64(a.WarnBelow), Refuse: uint64(a.RefuseBelow), Act: uint64(a.ActBelow), WhenFull: policies[a.WhenFull]},
		Audit: d.Audit, Metrics: metrics.NewAuditKeep(d.Metrics), Log: d.Log,
	}
	for _, w := range a.Witnesses {
		to := auditkeep.Witness{Name: w.Name, Key: w.Key, Timeout: w.Timeout, Queue: w.Queue}
		switch w.Kind {
		case config.WitnessFile:
			to.File = w.Target
		case config.WitnessURL:
			to.URL = w.Target
		case config.WitnessSyslog:
			to.Syslog = w.Target
		}
		cfg.Witnesses = append(cfg.Witnesses, to)
	}
	return auditkeep.New(cfg)
}
