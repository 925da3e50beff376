package auditstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"tagout/internal/alert"
	"tagout/internal/audit"
	"tagout/internal/auditview"
)

func newSender(s Sink, version string) (sender, error) {
	if s.SecretFile != "" {
		if _, err := alert.Signature(s.SecretFile, nil); err != nil {
			return nil, err
		}
	}
	switch s.Kind {
	case Webhook:
		return &webhook{alert.NewHTTP(), s}, nil
	case OTLP:
		u, err := url.Parse(s.URL)
		if err != nil {
			return nil, errors.New("its URL cannot be read")
		}
		if u.Path == "" || u.Path == "/" {
			u.Path = "/v1/logs" // OTLP/HTTP's default
		}
		return &otlp{http: alert.NewHTTP(), url: u.String(), secretFile: s.SecretFile, version: version}, nil
	case Syslog:
		to, err := alert.NewSyslog(s.URL)
		if err != nil {
			return nil, err
		}
		return &syslog{to}, nil
	}
	return nil, errors.New("this build does not know its kind")
}

// webhook posts {"records": […]}, each as it stands in its log, signed as alerts are.
type webhook struct {
	http *alert.HTTP
	sink Sink
}

func (w *webhook) send(ctx context.Context, batch []item) (int, error) {
	var body bytes.Buffer
	body.WriteString(`{"records":[`)
	for i, it := range batch {
		if i > 0 {
			body.WriteByte(',')
		}
		body.WriteString("\n")
		body.Write(it.line.Raw)
	}
	body.WriteString("\n]}\n")
	header := map[string]string{"Idempotency-Key": batch[0].line.ID + "-" + batch[len(batch)-1].line.ID + "-" + strconv.Itoa(len(batch))}
	if w.sink.SecretFile != "" {
		sig, err := alert.Signature(w.sink.SecretFile, body.Bytes())
		if err != nil {
			return 0, err
		}
		header[alert.SignatureHeader] = sig
	}
	_, err := w.http.Post(ctx, w.sink.URL, body.Bytes(), header)
	return 0, err
}

func (w *webhook) close() { w.http.Close() }

// otlp posts OTLP/HTTP with binary protobuf.
type otlp struct {
	http                     *alert.HTTP
	url, secretFile, version string
}

func (o *otlp) send(ctx context.Context, batch []item) (int, error) {
	// ExportLogsServiceRequest is LogsData on the wire; its own package would bring all of gRPC.
	body, err := proto.Marshal(logsData(batch, o.version))
	if err != nil {
		return 0, fmt.Errorf("writing records for OTLP: %w: %w", err, alert.ErrRefused)
	}
	header := map[string]string{"Content-Type": "application/x-protobuf"}
	if o.secretFile != "" {
		raw, err := os.ReadFile(o.secretFile)
		if err != nil {
			return 0, fmt.Errorf("reading the Authorization header: %w", err)
		}
		header["Authorization"] = strings.TrimSpace(string(raw))
	}
	answer, err := o.http.Post(ctx, o.url, body, header)
	if err != nil {
		return 0, err
	}
	return min(rejected(answer), len(batch)), nil
}

func (o *otlp) close() { o.http.Close() }

// rejected reads how many records a receiver took and will not keep: ExportLogsServiceResponse.partial_success (1)
// .rejected_log_records (1). What cannot be read rejects nothing.
func rejected(answer []byte) int {
	partial, ok := field(answer, 1, protowire.BytesType)
	if !ok {
		return 0
	}
	inner, n := protowire.ConsumeBytes(partial)
	if n < 0 {
		return 0
	}
	count, ok := field(inner, 1, protowire.VarintType)
	if !ok {
		return 0
	}
	v, n := protowire.ConsumeVarint(count)
	if n < 0 || v > 1<<31 {
		return 0
	}
	return int(v)
}

// field returns what follows the tag of a message's field.
func field(b []byte, number protowire.Number, kind protowire.Type) ([]byte, bool) {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return nil, false
		}
		b = b[n:]
		if num == number && typ == kind {
			return b, true
		}
		if n = protowire.ConsumeFieldValue(num, typ, b); n < 0 {
			return nil, false
		}
		b = b[n:]
	}
	return nil, false
}

// syslog sends a message a record.
type syslog struct{ to *alert.SyslogConn }

func (s *syslog) send(ctx context.Context, batch []item) (int, error) {
	messages := make([][]byte, len(batch))
	for i, it := range batch {
		messages[i] = message(&it.line, s.to.Host(), s.to.Stream())
	}
	return 0, s.to.Send(ctx, messages)
}

func (s *syslog) close() { s.to.Close() }

const (
	facility     = 13 // log audit (RFC 5424, table 1)
	structuredID = "tagout@32473"
	datagramMost = 2048 // what receivers should take, at least
)

// message is a record as RFC 5424 wants it. Its text is the record's JSON; over datagrams a long one is in words, cut.
func message(l *auditview.Line, host string, stream bool) []byte {
	r := &l.Record
	level := 6 // informational
	switch r.Outcome {
	case audit.OutcomeDeny:
		level = 4
	case audit.OutcomeFail:
		level = 3
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "<%d>1 %s %s tagout %s %s [%s", facility*8+level, r.Time.UTC().Format("2006-01-02T15:04:05.000000Z07:00"), host,
		alert.HeaderField(r.Daemon, 128), alert.HeaderField(r.Event, 32), structuredID)
	for _, p := range [][2]string{{"id", r.ID}, {"instance", r.Instance}, {"daemon", r.Daemon}, {"event", r.Event}, {"kid", r.Kid}, {"session", r.Session}, {"card", r.Card},
		{"outcome", r.Outcome}, {"reason", reasonOf(l)}, {"actor", r.Actor}, {"destination", auditview.Destination(r)}} {
		if p[1] != "" {
			fmt.Fprintf(&b, ` %s="%s"`, p[0], alert.Param(p[1]))
		}
	}
	b.WriteString("] ")
	if stream || b.Len()+len(l.Raw) <= datagramMost {
		b.Write(l.Raw)
		return b.Bytes()
	}
	text := strings.ToValidUTF8(auditview.What(l), "\uFFFD")
	if room := max(0, datagramMost-b.Len()); len(text) > room {
		text = strings.ToValidUTF8(text[:room], "")
	}
	b.WriteString(text)
	return b.Bytes()
}

func reasonOf(l *auditview.Line) string {
	if l.Reason == 0 {
		return ""
	}
	return l.Reason.String()
}

// valid is s as a protobuf string may be.
func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// unixNano is a record's time as OTLP has it; 0 where a clock was wrong.
func unixNano(t time.Time) uint64 { return uint64(max(0, t.UnixNano())) }
