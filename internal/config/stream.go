package config

import (
	"path"
	"slices"
	"strings"
	"time"
	"unicode"

	"tagout/internal/yamlx"
)

// Kinds of receivers of all records.
const (
	StreamOTLP    = "otlp"    // OTLP logs over HTTP
	StreamSyslog  = "syslog"  // RFC 5424
	StreamWebhook = "webhook" // JSON documents
)

// Defaults and bounds of a stream.
const (
	DefaultPatience    = time.Minute
	DefaultStreamQueue = 8192

	minStreamQueue, maxStreamQueue = 64, 1 << 20
)

// Stream is one receiver of all records, as they are written.
type Stream struct {
	Name       string
	Kind       string
	URL        string        // http or https; for syslog udp://host:port, tcp://host:port or unix:///path
	SecretFile string        // webhook: the key that signs; otlp: the value of the Authorization header; empty: neither
	Timeout    time.Duration // for one attempt
	Patience   time.Duration // how long it may take nothing before it loses records
	Queue      int           // records that may wait in memory
}

type streamFile struct {
	Name       string `yaml:"name"`
	OTLP       string `yaml:"otlp,omitempty"`
	Syslog     string `yaml:"syslog,omitempty"`
	Webhook    string `yaml:"webhook,omitempty"`
	SecretFile string `yaml:"secretFile,omitempty"`
	Timeout    string `yaml:"timeout,omitempty"`
	Patience   string `yaml:"patience,omitempty"`
	Queue      int    `yaml:"queue,omitempty"`
}

func (s Stream) file() streamFile {
	f := streamFile{Name: s.Name, SecretFile: s.SecretFile, Queue: s.Queue}
	if s.Timeout != 0 {
		f.Timeout = s.Timeout.String()
	}
	if s.Patience != 0 {
		f.Patience = s.Patience.String()
	}
	switch s.Kind {
	case StreamOTLP:
		f.OTLP = s.URL
	case StreamSyslog:
		f.Syslog = s.URL
	case StreamWebhook:
		f.Webhook = s.URL
	}
	return f
}

var streamKeys = []yamlx.Key{
	{Name: "name", Example: "otel"},
	{Name: StreamOTLP, Example: "http://127.0.0.1:4318"},
	{Name: StreamSyslog, Example: "tcp://192.0.2.60:601"},
	{Name: StreamWebhook, Example: "https://siem.example.com/tagout"},
	{Name: "secretFile", Example: "/etc/tagout/stream-key"},
	{Name: "timeout", Example: "3s"},
	{Name: "patience", Example: "1m"},
	{Name: "queue", Example: "8192"},
}

func readStreams(v yamlx.Value) []Stream {
	var out []Stream
	for _, entry := range v.List() {
		m, ok := entry.Map(streamKeys...)
		if !ok {
			continue
		}
		s := Stream{
			Timeout:  readDuration(m.Get("timeout"), "timeout", DefaultTimeout, 100*time.Millisecond, time.Minute),
			Patience: readDuration(m.Get("patience"), "patience", DefaultPatience, time.Second, 24*time.Hour),
			Queue:    DefaultStreamQueue,
		}
		if n, ok := m.Get("queue").Int(); ok {
			if s.Queue = int(n); n < minStreamQueue || n > maxStreamQueue {
				m.Get("queue").Refuse("write a number from 64 to 1048576", "queue is %d", n)
			}
		}
		name := m.Need("name")
		s.Name, _ = name.Text()
		if s.Name != "" && (!sinkName.MatchString(s.Name) || slices.ContainsFunc(out, func(o Stream) bool { return o.Name == s.Name })) {
			name.Refuse("write up to 32 small letters, digits and single dashes, once", "%s cannot name a receiver of records", yamlx.Quote(s.Name))
		}
		s.Kind, s.URL = readStreamTarget(entry, m)
		s.SecretFile = readStreamSecret(m, s.Kind)
		out = append(out, s)
	}
	return out
}

func readStreamTarget(entry yamlx.Value, m yamlx.Map) (kind, url string) {
	for _, k := range []string{StreamOTLP, StreamSyslog, StreamWebhook} {
		if !m.Has(k) {
			continue
		}
		if kind != "" {
			m.Get(k).Refuse("write two entries, each with a name of its own", "a receiver cannot be both %s and %s", kind, k)
			return kind, url
		}
		if kind = k; k == StreamSyslog {
			url = readSyslog(m.Get(k))
		} else {
			url = readURL(m.Get(k), k, streamKeys[slices.IndexFunc(streamKeys, func(key yamlx.Key) bool { return key.Name == k })].Example)
		}
	}
	if kind == "" {
		entry.Refuse("write one of otlp, syslog, webhook", "nothing says where the records go")
	}
	return kind, url
}

func readStreamSecret(m yamlx.Map, kind string) string {
	v := m.Get("secretFile")
	s, ok := v.Text()
	switch {
	case !ok:
	case kind == StreamSyslog:
		v.Refuse("remove the key", "nothing in syslog is signed")
	case !path.IsAbs(s) || strings.IndexFunc(s, unicode.IsControl) >= 0: // not quoted: it may be the secret itself
		v.Refuse("write the absolute path of a file that holds the secret, such as `/etc/tagout/stream-key`", "secretFile is not an absolute path")
	}
	return s
}
