package main

import (
	"tagout/internal/alert"
	"tagout/internal/auditstream"
	"tagout/internal/config"
)

// sinks returns the receivers of alerts that the box's configuration names.
func sinks(box *config.Box) []alert.Sink {
	kinds := map[string]string{
		config.SinkWebhook: alert.Webhook, config.SinkAlertmanager: alert.Alertmanager, config.SinkSyslog: alert.Syslog,
	}
	var out []alert.Sink
	for _, s := range box.Sinks() {
		out = append(out, alert.Sink{
			Name: s.Name, Kind: kinds[s.Kind], URL: s.URL, SecretFile: s.SecretFile,
			Window: s.Window, Timeout: s.Timeout, Queue: s.Queue,
		})
	}
	return out
}

// streams are those who get all records.
func streams(box *config.Box) []auditstream.Sink {
	kinds := map[string]string{
		config.StreamOTLP: auditstream.OTLP, config.StreamSyslog: auditstream.Syslog, config.StreamWebhook: auditstream.Webhook,
	}
	var out []auditstream.Sink
	for _, s := range box.Audit.Sinks {
		out = append(out, auditstream.Sink{
			Name: s.Name, Kind: kinds[s.Kind], URL: s.URL, SecretFile: s.SecretFile, Timeout: s.Timeout, Patience: s.Patience, Queue: s.Queue,
		})
	}
	return out
}
