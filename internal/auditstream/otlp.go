package auditstream

import (
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	logspb "go.opentelemetry.io/proto/otlp/logs/v1"
	resourcepb "go.opentelemetry.io/proto/otlp/resource/v1"

	"tagout/internal/audit"
	"tagout/internal/auditview"
)

// logsData is a batch in OTLP: a resource an instance, a scope a daemon, records in their order.
func logsData(batch []item, version string) *logspb.LogsData {
	data := &logspb.LogsData{}
	resources := map[string]*logspb.ResourceLogs{}
	scopes := map[[2]string]*logspb.ScopeLogs{}
	for i := range batch {
		l := &batch[i].line
		r := resources[l.Instance]
		if r == nil {
			r = &logspb.ResourceLogs{Resource: &resourcepb.Resource{Attributes: []*commonpb.KeyValue{
				text("service.name", "tagout"), text("service.version", version), text("service.instance.id", l.Instance),
			}}}
			resources[l.Instance] = r
			data.ResourceLogs = append(data.ResourceLogs, r)
		}
		s := scopes[[2]string{l.Instance, l.Daemon}]
		if s == nil {
			s = &logspb.ScopeLogs{Scope: &commonpb.InstrumentationScope{Name: "tagout/" + valid(l.Daemon), Version: version}}
			scopes[[2]string{l.Instance, l.Daemon}] = s
			r.ScopeLogs = append(r.ScopeLogs, s)
		}
		s.LogRecords = append(s.LogRecords, logRecord(l))
	}
	return data
}

// logRecord is one record. Its body is the line as it stands in the log; attributes have OpenTelemetry's names where there
// are some.
func logRecord(l *auditview.Line) *logspb.LogRecord {
	r := &l.Record
	out := &logspb.LogRecord{
		TimeUnixNano: unixNano(r.Time), ObservedTimeUnixNano: unixNano(r.Time), EventName: "tagout." + valid(r.Event),
		SeverityNumber: logspb.SeverityNumber_SEVERITY_NUMBER_INFO, SeverityText: "INFO", Body: value(string(l.Raw)),
	}
	switch r.Outcome {
	case audit.OutcomeDeny:
		out.SeverityNumber, out.SeverityText = logspb.SeverityNumber_SEVERITY_NUMBER_WARN, "WARN"
	case audit.OutcomeFail:
		out.SeverityNumber, out.SeverityText = logspb.SeverityNumber_SEVERITY_NUMBER_ERROR, "ERROR"
	}
	for _, a := range [][2]string{{"tagout.record.id", r.ID}, {"tagout.kid", r.Kid}, {"tagout.session", r.Session}, {"tagout.card", r.Card}, {"tagout.outcome", r.Outcome}, {"tagout.reason", reasonOf(l)},
		{"tagout.stop", r.Fields["stop"]}, {"tagout.topic", auditview.Topic(r.Event)}, {"user.name", r.Actor}} {
		if a[1] != "" {
			out.Attributes = append(out.Attributes, text(a[0], a[1]))
		}
	}
	if d := r.Dst; d != nil {
		name := d.Name
		if name == "" && d.Addr.IsValid() {
			name = d.Addr.String()
		}
		if name != "" {
			out.Attributes = append(out.Attributes, text("server.address", name))
		}
		if d.Port != 0 {
			out.Attributes = append(out.Attributes, number("server.port", int64(d.Port)))
		}
	}
	if p := r.Process; p != nil {
		out.Attributes = append(out.Attributes, number("process.pid", int64(p.PID)))
		if p.Exe != "" {
			out.Attributes = append(out.Attributes, text("process.executable.path", p.Exe))
		}
	}
	return out
}

func value(s string) *commonpb.AnyValue {
	return &commonpb.AnyValue{Value: &commonpb.AnyValue_StringValue{StringValue: valid(s)}}
}

func text(key, s string) *commonpb.KeyValue { return &commonpb.KeyValue{Key: key, Value: value(s)} }

func number(key string, n int64) *commonpb.KeyValue {
	return &commonpb.KeyValue{Key: key, Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_IntValue{IntValue: n}}}
}
