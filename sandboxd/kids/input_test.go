package kids

import (
	"bytes"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// TestLeavingDoesNotWaitForInput: a command that reads nothing holds its input up, and not its caller's leaving.
func TestLeavingDoesNotWaitForInput(t *testing.T) {
	b := newBox(t, "tsbleave")
	b.spawn("k1", plan())
	input := make(chan wire.ExecInput)
	started := make(chan string, 1)
	returned := make(chan error, 1)
	go func() {
		r := wire.ExecRequest{Argv: []string{"sleep", "300"}, Input: true}
		returned <- b.ExecInput(t.Context(), "k1", "test", r, input, func(f wire.ExecFrame) error {
			started <- f.ID
			return nil
		})
	}()
	id := <-started
	// Two fill the pipe, one is being written, one waits, and the last has nowhere to go.
	for range 5 {
		input <- wire.ExecInput{Stdin: make([]byte, 32<<10)}
	}
	if err := b.DetachExec("k1", id); err != nil {
		t.Fatal(err)
	}
	if err := <-returned; err != nil {
		t.Fatal(err)
	}
	if e, err := b.ExecStatus(t.Context(), "k1", id); err != nil || !e.Detached || e.Exit != nil {
		t.Errorf("after its caller left: %+v %v", e, err)
	}
	if err := b.EndExec(t.Context(), "k1", id, "test", ""); err != nil {
		t.Error(err)
	}
	if err := b.ResizeExec("k1", "nothing", wire.TermSize{}); KindOf(err) != NotFound {
		t.Errorf("a command that is not there: %v", err)
	}
}

// TestADetachedTerminalIsTypedInto by whoever attaches, by name in the record; and by nobody while a tag hangs.
func TestADetachedTerminalIsTypedInto(t *testing.T) {
	b := newBox(t, "tsbtyped")
	b.spawn("k1", plan())
	id := b.detached("k1", wire.ExecRequest{Argv: []string{"sh"}, TTY: &wire.TermSize{Rows: 24, Cols: 80}, Input: true})
	typed := func(line string) (string, error) {
		input := make(chan wire.ExecInput, 1)
		input <- wire.ExecInput{Stdin: []byte(line)}
		var out bytes.Buffer
		err := b.Attach(t.Context(), "k1", id, "ada", input, func(f wire.ExecFrame) error {
			out.Write(f.Stdout)
			if strings.Contains(out.String(), "answer 42") {
				return bytes.ErrTooLarge // enough was seen
			}
			return nil
		})
		return out.String(), err
	}
	if out, err := typed("echo answer $((6*7))\n"); err != nil || !strings.Contains(out, "answer 42") {
		t.Fatalf("%q %v", out, err)
	}
	if n := b.audit.count(audit.EventExecAttached, audit.OutcomeOK); n != 1 {
		t.Errorf("%d records", n)
	}
	b.guards.tag(wire.Tag{Scope: wire.Scope{Kid: "k1"}, By: "ada"})
	if out, err := typed("echo answer $((6*7))\n"); KindOf(err) != Tagged || ReasonOf(err) != reason.Tagged || out != "" {
		t.Errorf("while a tag hangs: %q %v", out, err)
	}
	if n := b.audit.count(audit.EventExecAttached, audit.OutcomeDeny); n != 1 {
		t.Errorf("%d records of the refusal", n)
	}
	if err := b.EndExec(t.Context(), "k1", id, "test", ""); err != nil {
		t.Fatal(err)
	}
	if r, _ := b.attached("k1", id); !strings.Contains(r.stdout.String(), "answer 42") { // reading is no driving
		t.Errorf("%q", r.stdout.String())
	}
}
