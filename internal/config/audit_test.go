package config

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

const auditHead = "apiVersion: tagout/v1\nkind: Box\nresolvers: [\"192.0.2.53:53\"]\naudit:\n"

func TestTheAuditSectionIsRead(t *testing.T) {
	text := auditHead + `  retention: 183d
  recipients: [age1lggyhqrw2nlhcxprm67z43rta597azn8gknawjehu9d9dl0jq3yqqvfafg]
  witnesses:
    - {name: elsewhere, file: /mnt/witness/box}
    - {name: net, url: "https://witness.example.com", key: "witness.example.com+30c68dfc+BCqCkc8TfDXHt/Mbzb6upQmqGejrdC8wsxTARlvZDxbN"}
    - {name: siem, syslog: "tcp://192.0.2.60:601", timeout: 1s, queue: 64}
  sinks:
    - {name: otel, otlp: "http://127.0.0.1:4318", secretFile: /etc/tagout/otel}
    - {name: siem, syslog: "tcp://192.0.2.60:601", timeout: 1s, patience: 10s, queue: 64}
    - {name: hook, webhook: "https://siem.example.com/x"}
  whenFull: freeze
  warnBelow: 4GiB
  refuseBelow: 1GiB
  actBelow: 256MiB
`
	b, err := Parse("f", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	a := b.Audit
	if a.Days() != 183 || len(a.Recipients) != 1 || len(a.Witnesses) != 3 || a.WhenFull != FullFreeze || a.ActBelow != 256<<20 || a.Witnesses[2].Queue != 64 ||
		len(a.Sinks) != 3 || a.Sinks[0].Kind != StreamOTLP || a.Sinks[1].Patience != 10*time.Second || a.Sinks[2].Queue != DefaultStreamQueue {
		t.Errorf("%+v", a)
	}
	raw, err := b.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	again, err := Parse("f", raw)
	if err != nil || !reflect.DeepEqual(again.Audit, a) {
		t.Errorf("written and read again: %+v %v", again, err)
	}
	if b, err := Parse("f", []byte(strings.TrimSuffix(auditHead, "audit:\n"))); err != nil || b.Audit.Days() != DefaultRetention {
		t.Errorf("without the section: %+v %v", b, err)
	}
}

func TestTheAuditSectionIsChecked(t *testing.T) {
	for text, want := range map[string]string{
		"  retention: 90\n":    "retention is",
		"  retention: 0d\n":    "retention is",
		"  retention: 2160h\n": "retention is",
		"  recipients: [AGE-SECRET-KEY-1QQQQQQQQQQQQQQQQQQQQ]\n":                    "no age recipient",
		"  witnesses: [{name: a}]\n":                                                "nothing says where",
		"  witnesses: [{name: a, file: rel}]\n":                                     "not an absolute path",
		"  witnesses: [{name: a, file: /x, syslog: \"udp://1:1\"}]\n":               "cannot be both",
		"  witnesses: [{name: a, file: /x, key: k}]\n":                              "only a witness with a url",
		"  witnesses: [{name: a, file: /x}, {name: a, file: /y}]\n":                 "cannot name a witness",
		"  sinks: [{name: a}]\n":                                                    "nothing says where",
		"  sinks: [{name: a, otlp: \"tcp://1:1\"}]\n":                               "not an http or https URL",
		"  sinks: [{name: a, otlp: \"http://h\", webhook: \"http://h\"}]\n":         "cannot be both",
		"  sinks: [{name: a, syslog: \"udp://h:1\", secretFile: /x}]\n":             "nothing in syslog is signed",
		"  sinks: [{name: a, otlp: \"http://h\", secretFile: x}]\n":                 "not an absolute path",
		"  sinks: [{name: a, otlp: \"http://h\", queue: 1}]\n":                      "queue is 1",
		"  sinks: [{name: a, otlp: \"http://h\"}, {name: a, otlp: \"http://h\"}]\n": "cannot name a receiver",
		"  whenFull: explode\n":                                                     "whenFull is",
		"  warnBelow: 1MiB\n  refuseBelow: 1GiB\n":                                  "wrong order",
	} {
		if _, err := Parse("f", []byte(auditHead+text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}
