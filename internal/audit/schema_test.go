package audit

import (
	"encoding/json"
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"tagout/internal/reason"
)

// events are the event names that the code has.
func events(t *testing.T) (out []string) {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), "record.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(f, func(n ast.Node) bool {
		if v, ok := n.(*ast.ValueSpec); ok && strings.HasPrefix(v.Names[0].Name, "Event") {
			name, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Error(err)
			}
			out = append(out, name)
		}
		return true
	})
	if len(out) < 60 {
		t.Fatalf("only %d events were found: the test shows nothing", len(out))
	}
	slices.Sort(out)
	return out
}

var update = flag.Bool("update", false, "write the events and reasons of the code into the schema")

const schemaFile = "../../deploy/schema/audit-v1.json"

// rewrite gives the schema the code's events and reasons.
func rewrite(t *testing.T, words map[string][]string) {
	t.Helper()
	raw, err := os.ReadFile(schemaFile)
	if err != nil {
		t.Fatal(err)
	}
	text := string(raw)
	for name, list := range words {
		at := regexp.MustCompile(`(?s)("` + name + `": \{[^{}]*"enum": \[\n).*?(\n *\])`)
		text = at.ReplaceAllString(text, "${1}        \""+strings.Join(list, "\",\n        \"")+"\"${2}")
	}
	if err := os.WriteFile(schemaFile, []byte(text), 0o644); err != nil { // as all files of the repository
		t.Fatal(err)
	}
}

type node struct {
	Properties map[string]node `json:"properties"`
	Enum       []string        `json:"enum"`
	Required   []string        `json:"required"`
}

// fieldsOf are the JSON names of a struct's fields.
func fieldsOf(typ reflect.Type) (out []string) {
	for i := range typ.NumField() {
		name, _, _ := strings.Cut(typ.Field(i).Tag.Get("json"), ",")
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

func keys(n node) (out []string) {
	for name := range n.Properties {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// TestSchemaIsThatOfRecords: the published schema has the events, reasons and fields that the code has, and no others.
func TestSchemaIsThatOfRecords(t *testing.T) {
	t.Parallel()
	var words []string
	for _, info := range reason.All() {
		words = append(words, info.Word)
	}
	slices.Sort(words)
	if *update {
		rewrite(t, map[string][]string{"event": events(t), "reason": words})
	}
	raw, err := os.ReadFile(schemaFile)
	if err != nil {
		t.Fatal(err)
	}
	var schema node
	if err := json.Unmarshal(raw, &schema); err != nil {
		t.Fatal(err)
	}
	if want := events(t); !slices.Equal(schema.Properties["event"].Enum, want) {
		t.Errorf("its events are\n%q, the code's\n%q: run `make schema`", schema.Properties["event"].Enum, want)
	}
	if !slices.Equal(schema.Properties["reason"].Enum, words) {
		t.Errorf("its reasons are\n%q, the code's\n%q: run `make schema`", schema.Properties["reason"].Enum, words)
	}
	for part, typ := range map[string]reflect.Type{"": reflect.TypeFor[Record](), "process": reflect.TypeFor[Process](), "dst": reflect.TypeFor[Dst](), "bytes": reflect.TypeFor[Bytes]()} {
		n := schema
		if part != "" {
			n = schema.Properties[part]
		}
		if !slices.Equal(keys(n), fieldsOf(typ)) {
			t.Errorf("%s has %q in the schema, %q in the code", part, keys(n), fieldsOf(typ))
		}
	}
}

// TestEveryEventIsDocumented in the table, and every event there is one.
func TestEveryEventIsDocumented(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("../../docs/audit.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(raw), "\n## Events\n")
	if !found {
		t.Fatal("docs/audit.md has no section Events")
	}
	table, _, _ = strings.Cut(table, "\n## ")
	var rows []string
	for line := range strings.Lines(table) {
		first, _, _ := strings.Cut(strings.TrimPrefix(line, "| "), " |")
		for _, m := range regexp.MustCompile("`([a-z]+\\.[a-z-]+)`").FindAllStringSubmatch(first, -1) {
			rows = append(rows, m[1])
		}
	}
	slices.Sort(rows)
	if want := events(t); !slices.Equal(rows, want) {
		for _, e := range want {
			if !slices.Contains(rows, e) {
				t.Errorf("%s has no row", e)
			}
		}
		for i, e := range rows {
			if !slices.Contains(want, e) || i > 0 && rows[i-1] == e {
				t.Errorf("%s is no event, or has two rows", e)
			}
		}
	}
}

// TestRecordsAreRightByTheSchema, whatever is in them.
func TestRecordsAreRightByTheSchema(t *testing.T) {
	t.Parallel()
	schema, err := jsonschema.NewCompiler().Compile(schemaFile)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "x.jsonl")
	l, err := Open(path, "test", "proxy")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events(t) {
		l.Log(Record{Event: e, Outcome: OutcomeDeny, Reason: reason.Stopped, Process: &Process{PID: 1, Parent: 2}, Dst: &Dst{Name: "\xff"}, Bytes: &Bytes{}, Fields: map[string]string{"a": "\x00"}})
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(string(raw)) {
		n++
		doc, err := jsonschema.UnmarshalJSON(strings.NewReader(line))
		if err == nil {
			err = schema.Validate(doc)
		}
		if err != nil {
			t.Errorf("%s: %v", line, err)
		}
		if bad, err := jsonschema.UnmarshalJSON(strings.NewReader(strings.Replace(line, `"event":"`, `"event":"no-`, 1))); err != nil || schema.Validate(bad) == nil {
			t.Error("a record of no event is right by it")
		}
	}
	if n < len(events(t)) {
		t.Errorf("%d lines", n)
	}
}
