package reason

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the table into docs/egress.md")

const (
	docFile   = "../../docs/egress.md"
	docBegin  = "<!-- reason codes: written by `go test ./internal/reason -update` -->\n"
	docEnd    = "<!-- end of reason codes -->\n"
	docHeader = "| code | what happened | what to do |\n| --- | --- | --- |\n"
)

// docTable is the table of docs/egress.md, in the order of the numbers.
func docTable() string {
	var codes []Code
	for c := range All() {
		if c != OK {
			codes = append(codes, c)
		}
	}
	slices.Sort(codes)
	var b strings.Builder
	b.WriteString(docHeader)
	for _, c := range codes {
		info := c.Info()
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", info.Word, info.Text, info.Hint)
	}
	return b.String()
}

// TestTheDocumentationHasEveryCode keeps the one table and its printed form together.
func TestTheDocumentationHasEveryCode(t *testing.T) {
	raw, err := os.ReadFile(docFile)
	if err != nil {
		t.Fatal(err)
	}
	doc := string(raw)
	begin, end := strings.Index(doc, docBegin), strings.Index(doc, docEnd)
	if begin < 0 || end < begin {
		t.Fatalf("%s has no place for the table", docFile)
	}
	begin += len(docBegin)
	if *update {
		if err := os.WriteFile(docFile, []byte(doc[:begin]+docTable()+doc[end:]), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if doc[begin:end] != docTable() {
		t.Errorf("%s is behind: run go test ./internal/reason -update", docFile)
	}
}
