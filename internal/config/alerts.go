package config

import (
	"fmt"
	"net"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"tagout/internal/yamlx"
)

// Kinds of sinks.
const (
	SinkWebhook      = "webhook"      // one JSON document an alert
	SinkAlertmanager = "alertmanager" // Prometheus Alertmanager, API v2
	SinkSyslog       = "syslog"       // RFC 5424
)

// PlainSink is the name of the sink that alertWebhook stands for.
const PlainSink = "webhook"

// Defaults and bounds of a sink.
const (
	DefaultWindow  = 10 * time.Second
	DefaultTimeout = 3 * time.Second
	DefaultQueue   = 1024

	minQueue, maxQueue = 16, 65536
)

// Sink is one receiver of alerts.
type Sink struct {
	Name       string        // letters, digits and dashes
	Kind       string        // SinkWebhook, SinkAlertmanager or SinkSyslog
	URL        string        // http or https; for syslog udp://host:port, tcp://host:port or unix:///path
	SecretFile string        // webhook only: file with the key that signs; empty: nothing is signed
	Window     time.Duration // how long repeats of an alert are counted before their number is sent
	Timeout    time.Duration // how long one attempt to send may take
	Queue      int           // alerts that may wait; more are dropped and counted
}

// PlainWebhook returns the sink that alertWebhook stands for.
func PlainWebhook(url string) Sink {
	return Sink{Name: PlainSink, Kind: SinkWebhook, URL: url, Window: DefaultWindow, Timeout: DefaultTimeout, Queue: DefaultQueue}
}

// Sinks returns all receivers of alerts, the one of alertWebhook among them.
func (b *Box) Sinks() []Sink {
	var out []Sink
	if b.AlertWebhook != "" {
		out = append(out, PlainWebhook(b.AlertWebhook))
	}
	return append(out, b.Alerts...)
}

// sinkFile is a sink's form in the file, for writing.
type sinkFile struct {
	Name         string `yaml:"name"`
	Webhook      string `yaml:"webhook,omitempty"`
	Alertmanager string `yaml:"alertmanager,omitempty"`
	Syslog       string `yaml:"syslog,omitempty"`
	SecretFile   string `yaml:"secretFile,omitempty"`
	Window       string `yaml:"window,omitempty"`
	Timeout      string `yaml:"timeout,omitempty"`
	Queue        int    `yaml:"queue,omitempty"`
}

func (s Sink) file() sinkFile {
	f := sinkFile{Name: s.Name, SecretFile: s.SecretFile, Queue: s.Queue}
	if s.Window != 0 {
		f.Window = s.Window.String()
	}
	if s.Timeout != 0 {
		f.Timeout = s.Timeout.String()
	}
	switch s.Kind {
	case SinkWebhook:
		f.Webhook = s.URL
	case SinkAlertmanager:
		f.Alertmanager = s.URL
	case SinkSyslog:
		f.Syslog = s.URL
	}
	return f
}

var sinkKinds = []string{SinkWebhook, SinkAlertmanager, SinkSyslog}

var sinkKeys = []yamlx.Key{
	{Name: "name", Example: "ops"},
	{Name: SinkWebhook, Example: "https://alerts.example.com/tagout"},
	{Name: SinkAlertmanager, Example: "http://127.0.0.1:9093"},
	{Name: SinkSyslog, Example: "udp://192.0.2.60:514"},
	{Name: "secretFile", Example: "/etc/tagout/alert-key"},
	{Name: "window", Example: "10s"},
	{Name: "timeout", Example: "3s"},
	{Name: "queue", Example: "1024"},
}

func readSinks(v yamlx.Value) []Sink {
	var out []Sink
	for _, entry := range v.List() {
		m, ok := entry.Map(sinkKeys...)
		if !ok {
			continue
		}
		s := Sink{
			Name:       readSinkName(m.Need("name"), out),
			SecretFile: readSecretFile(m),
			Window:     readDuration(m.Get("window"), "window", DefaultWindow, time.Second, time.Hour),
			Timeout:    readDuration(m.Get("timeout"), "timeout", DefaultTimeout, 100*time.Millisecond, time.Minute),
			Queue:      readQueue(m.Get("queue")),
		}
		s.Kind, s.URL = readTarget(entry, m)
		out = append(out, s)
	}
	return out
}

var sinkName = regexp.MustCompile(`^[a-z0-9](-?[a-z0-9]){0,31}$`)

func readSinkName(v yamlx.Value, before []Sink) string {
	s, ok := v.Text()
	switch {
	case !ok:
	case !sinkName.MatchString(s):
		v.Refuse("write up to 32 small letters, digits and single dashes, such as `ops-pager`", "%s cannot name a receiver of alerts", yamlx.Quote(s))
	case s == PlainSink:
		v.Refuse("write another name", "%s is the name of the receiver that alertWebhook gives", yamlx.Quote(s))
	case slices.ContainsFunc(before, func(o Sink) bool { return o.Name == s }):
		v.Refuse("give each receiver a name of its own", "%s is in this list already", yamlx.Quote(s))
	}
	return s
}

// readTarget reads where the alerts go: exactly one of three keys.
func readTarget(entry yamlx.Value, m yamlx.Map) (kind, url string) {
	for _, k := range sinkKinds {
		if !m.Has(k) {
			continue
		}
		if kind != "" {
			m.Get(k).Refuse("write two entries, each with a name of its own", "a receiver cannot be both %s and %s", kind, k)
			return kind, url
		}
		kind = k
		if k == SinkSyslog {
			url = readSyslog(m.Get(k))
		} else {
			url = readURL(m.Get(k), k, sinkKeys[slices.IndexFunc(sinkKeys, func(key yamlx.Key) bool { return key.Name == k })].Example)
		}
	}
	if kind == "" {
		entry.Refuse("write one of "+strings.Join(sinkKinds, ", "), "nothing says where the alerts go")
	}
	return kind, url
}

func readSyslog(v yamlx.Value) string {
	s, ok := v.Text()
	if !ok {
		return ""
	}
	const fix = "write `udp://192.0.2.60:514`, `tcp://192.0.2.60:601` or `unix:///dev/log`"
	u, err := url.Parse(s)
	if err != nil || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		v.Refuse(fix, "syslog is not an address of a syslog receiver")
		return s
	}
	switch u.Scheme {
	case "udp", "tcp":
		_, port, err := net.SplitHostPort(u.Host)
		n, errPort := strconv.Atoi(port)
		if err != nil || errPort != nil || n < 1 || n > 65535 || u.Hostname() == "" || u.Path != "" {
			v.Refuse(fix, "%s is not a host and a port", yamlx.Quote(s))
		}
	case "unix":
		if u.Host != "" || !path.IsAbs(u.Path) || len(u.Path) > 107 { // sun_path, unix(7)
			v.Refuse(fix, "%s is not the path of a socket", yamlx.Quote(s))
		}
	default:
		v.Refuse(fix, "%s is not an address of a syslog receiver", yamlx.Quote(s))
	}
	return s
}

func readSecretFile(m yamlx.Map) string {
	v := m.Get("secretFile")
	s, ok := v.Text()
	switch {
	case !ok:
	case !m.Has(SinkWebhook):
		v.Refuse("remove the key", "only a webhook's alerts are signed")
	case !path.IsAbs(s) || strings.IndexFunc(s, unicode.IsControl) >= 0: // not quoted: it may be the secret itself
		v.Refuse("write the absolute path of a file that holds the secret, such as `/etc/tagout/alert-key`", "secretFile is not an absolute path")
	}
	return s
}

func readDuration(v yamlx.Value, key string, preset, least, most time.Duration) time.Duration {
	s, ok := v.Text()
	if !ok {
		return preset
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < least || d > most {
		v.Refuse(fmt.Sprintf("write a time from %v to %v, such as `%v`", least, most, max(preset, least)), "%s is %s", key, yamlx.Quote(s))
	}
	return d
}

func readQueue(v yamlx.Value) int {
	n, ok := v.Int()
	if !ok {
		return DefaultQueue
	}
	if n < minQueue || n > maxQueue {
		v.Refuse(fmt.Sprintf("write a number from %d to %d", minQueue, maxQueue), "queue is %d", n)
	}
	return int(n)
}
