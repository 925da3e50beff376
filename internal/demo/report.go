package demo

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"tagout/internal/drill"
	"tagout/internal/practice"
)

// Report is the demo's JSON.
type Report struct {
	Instance string        `json:"instance"`
	Started  time.Time     `json:"started"`
	Took     time.Duration `json:"took_ns"`
	Steps    []Step        `json:"steps"`
	Ways     []Way         `json:"ways"`
	Drill    *drill.Report `json:"drill,omitempty"`
	Claims   []Claim       `json:"claims"`
	Error    string        `json:"error,omitempty"`
	Passed   bool          `json:"passed"`
}

// Step is one numbered step.
type Step struct {
	Name  string        `json:"name"`
	OK    bool          `json:"ok"`
	Took  time.Duration `json:"took_ns"`
	Error string        `json:"error,omitempty"`
}

// Claim is something that the demo says about Tagout, and whether it was observed.
type Claim struct {
	Text     string `json:"text"`
	Observed bool   `json:"observed"`
	Detail   string `json:"detail,omitempty"`
}

// evidence is what was observed. Its zero value supports no claim.
type evidence struct {
	practiceCard, chatCard, drillCard []byte

	ways       []Way
	secret     []byte         // the real one
	kidOutput  []byte         // everything that the kid ever printed
	logs       []byte         // all audit files
	apiUses    practice.Tally // of the credential, at the vendor's API
	tokensSeen int            // requests that reached the API with the kid's token in them

	modelKey []byte              // the real one
	chatted  []byte              // what the client library got, its environment included
	model    practice.ModelTally // what the model's API got

	drill           *drill.Report
	attackerCounted bool
	contacts        int
	attackerBytes   int64
	evilQueries     int

	looked    bool // for leftovers
	leftovers []string
}

// judge makes the claims.
func (e *evidence) judge() []Claim {
	var out []Claim
	claim := func(ok bool, text, format string, args ...any) {
		out = append(out, Claim{Text: text, Observed: ok, Detail: fmt.Sprintf(format, args...)})
	}
	claim(e.apiUses.Accepted > 0 && e.tokensSeen == 0, "The vendor's API got the real secret",
		"%d times, the kid's token %d times", e.apiUses.Accepted, e.tokensSeen)
	inKid, inLogs := len(e.secret) > 0 && bytes.Contains(e.kidOutput, e.secret), len(e.secret) > 0 && bytes.Contains(e.logs, e.secret)
	// That the kid's token is there shows that the search searched the right place.
	searched := len(e.secret) > 0 && bytes.Contains(e.kidOutput, []byte("tgo_")) && len(e.logs) > 0
	claim(searched && !inKid && !inLogs, "The secret is nowhere in the kid or the logs",
		"searched: %t; in the kid: %t; in the logs: %t", searched, inKid, inLogs)
	claim(e.model.Accepted > 0 && e.model.Refused == 0, "A vendor's client library worked with a placeholder key",
		"%d requests accepted, %d refused, %d with the kid's token", e.model.Accepted, e.model.Refused, e.model.Tokens)
	shown, said := len(e.modelKey) > 0 && bytes.Contains(append(bytes.Clone(e.chatted), e.logs...), e.modelKey), bytes.Contains(e.chatted, bytes.Repeat([]byte("*"), len(e.modelKey)))
	claim(len(e.modelKey) > 0 && bytes.Contains(e.chatted, []byte("tgo_")) && said && !shown, "The key that the model's answers show is masked",
		"masked: %t; shown: %t", said, shown)
	denied, fast, logged, alerted := e.count()
	all := len(ways)
	claim(len(e.ways) == all && denied == all && fast == all, "Eight ways out were denied at once", "%d denied, %d within %s", denied, fast, atOnce)
	claim(logged == all, "Each is in the log with reason, process name and pid", "%d of %d", logged, all)
	claim(alerted == all, "Each was alerted at the webhook", "%d of %d", alerted, all)
	claim(e.attackerCounted && e.contacts == 0 && e.attackerBytes == 0 && e.evilQueries == 0, "The attacker got nothing",
		"counted: %t; %d contacts, %d bytes, %d DNS queries", e.attackerCounted, e.contacts, e.attackerBytes, e.evilQueries)
	claim(e.drill != nil && e.drill.Passed, "Each stop layer alone, and all together, met its SLA", "%s", verdictsOf(e.drill))
	claim(e.looked && len(e.leftovers) == 0, "Nothing is left of the instance", "looked: %t; left: %s", e.looked, orNothing(e.leftovers))
	return out
}

// count returns how many distinct ways were denied, were denied fast, have a whole record, were alerted.
func (e *evidence) count() (denied, fast, logged, alerted int) {
	seen := map[int]bool{}
	for _, w := range e.ways {
		if seen[w.Number] {
			continue
		}
		seen[w.Number] = true
		if w.Denied {
			denied++
			if w.Took <= atOnce {
				fast++
			}
		}
		if w.Reason != 0 && w.Process != nil && w.Process.PID > 0 && w.Process.Comm != "" {
			logged++
			if w.Alerted {
				alerted++
			}
		}
	}
	return denied, fast, logged, alerted
}

func verdictsOf(rep *drill.Report) string {
	if rep == nil {
		return "no drill was run"
	}
	n := map[drill.Verdict]int{}
	for _, s := range rep.Summaries() {
		n[s.Verdict]++
	}
	return fmt.Sprintf("%d PASS, %d FAIL, %d VOID", n[drill.Pass], n[drill.Fail], n[drill.Void])
}

func orNothing(s []string) string {
	if len(s) == 0 {
		return "nothing"
	}
	return strings.Join(s, ", ")
}

func (r *Report) failed() []Claim {
	var out []Claim
	for _, c := range r.Claims {
		if !c.Observed {
			out = append(out, c)
		}
	}
	return out
}

// table shows the ways out, the drill and the claims.
func (r *Report) table(w io.Writer) {
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if len(r.Ways) > 0 {
		fmt.Fprintln(t, "WAY OUT\tRESULT\tAFTER\tREASON\tPROCESS\tALERTED")
		for _, way := range r.Ways {
			result, process := "denied", "-"
			if !way.Denied {
				result = "GOT OUT"
			}
			if way.Process != nil {
				process = fmt.Sprintf("%s[%d]", way.Process.Comm, way.Process.PID)
			}
			fmt.Fprintf(t, "%s\t%s\t%.1f ms\t%s\t%s\t%s\n", way.Name, result, float64(way.Took.Microseconds())/1000, way.Reason, process, yes(way.Alerted))
		}
		t.Flush() // a terminal
		fmt.Fprintln(w)
	}
	if r.Drill != nil {
		r.Drill.Table(w) // a terminal
		fmt.Fprintln(w)
	}
	fmt.Fprintln(t, "CLAIM\tOBSERVED\tDETAIL")
	for _, c := range r.Claims {
		fmt.Fprintf(t, "%s\t%s\t%s\n", c.Text, yes(c.Observed), c.Detail)
	}
	t.Flush() // a terminal
	fmt.Fprintf(w, "\nall of it took %.1f s\n", r.Took.Seconds())
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "NO"
}

func (r *Report) write(path string) error {
	raw, err := json.MarshalIndent(r, "", "  ")
	if err == nil {
		err = os.WriteFile(path, append(raw, '\n'), 0o644) // a report is for everybody
	}
	if err != nil {
		return fmt.Errorf("writing the demo's report: %w", err)
	}
	return nil
}
