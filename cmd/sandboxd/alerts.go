package main

import (
	"tagout/internal/alert"
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
