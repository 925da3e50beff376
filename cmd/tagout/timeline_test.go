package main

import (
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

// A record for people is one line that cannot steer their terminal, whatever a kid called itself.
func TestRecordLineIsOneLine(t *testing.T) {
	line := recordLine(audit.Record{
		Event: audit.EventConnectDenied, Outcome: audit.OutcomeDeny, Reason: reason.RawAddress, Process: &audit.Process{PID: 7, Comm: "a\x1b[2J\n"},
		Dst: &audit.Dst{Name: "evil\u202e.test\r"}, Detail: "x\ny", Fields: map[string]string{"argv": "sh\t\x9b"},
	})
	if strings.ContainsAny(line, "\x1b\n\r\t\u202e\u009b") {
		t.Errorf("%q", line)
	}
	for _, want := range []string{"deny raw-address", "evil?.test?", "a?[2J?", "[7]", "x?y"} {
		if !strings.Contains(line, want) {
			t.Errorf("%q does not say %q", line, want)
		}
	}
}
