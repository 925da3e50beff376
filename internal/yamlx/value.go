package yamlx

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml/ast"
)

// Value is one value of a file. The zero Value, and one that a Map does not have, is absent: reading it gives
// nothing and reports nothing, so that one problem is not reported twice.
type Value struct {
	doc     *Doc
	node    ast.Node
	pos     pos
	what    string // how messages call it: the key it belongs to
	example string // what could stand in its place, with its key
}

// Present says whether there is a value.
func (v Value) Present() bool { return v.node != nil }

// Line returns the line on which the value begins.
func (v Value) Line() int { return v.pos.line }

// Refuse reports a problem with the value. fix says what to do, beginning with a verb.
func (v Value) Refuse(fix, format string, args ...any) {
	if v.doc != nil {
		v.doc.add(v.pos.line, v.pos.col, fix, fmt.Sprintf(format, args...))
	}
}

// refuseType reports a value of another type than wanted.
func (v Value) refuseType(wanted string) {
	fix := "write " + wanted + " instead"
	if v.example != "" {
		fix = "write `" + v.example + "` instead"
	}
	v.Refuse(fix, "%s is %s, not %s", v.what, kind(v.node), wanted)
}

func kind(n ast.Node) string {
	switch n.(type) {
	case *ast.NullNode:
		return "empty"
	case *ast.StringNode, *ast.LiteralNode:
		return "a text"
	case *ast.IntegerNode, *ast.FloatNode, *ast.InfinityNode, *ast.NanNode:
		return "a number"
	case *ast.BoolNode:
		return "true or false"
	case *ast.SequenceNode:
		return "a list"
	case *ast.MappingNode, *ast.MappingValueNode:
		return "a set of keys"
	}
	return "something else"
}

// Text returns a text. A number or a bare true is not a text: the problem tells to quote it.
func (v Value) Text() (string, bool) {
	switch n := v.node.(type) {
	case nil:
	case *ast.StringNode:
		return n.Value, true
	case *ast.LiteralNode:
		return n.Value.Value, true
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		v.Refuse("write it in quotes, "+strconv.Quote(n.GetToken().Value), "%s is %s, not a text", v.what, kind(n))
	default:
		v.refuseType("a text")
	}
	return "", false
}

// Const reports any other text than want.
func (v Value) Const(want string) {
	if got, ok := v.Text(); ok && got != want {
		v.Refuse("write `"+want+"` instead", "this build does not know %s", Quote(got))
	}
}

var decimal = regexp.MustCompile(`^-?(0|[1-9][0-9]*)$`)

// Int returns a whole number written in plain decimal.
func (v Value) Int() (int64, bool) {
	n, ok := v.node.(*ast.IntegerNode)
	if !ok {
		if v.Present() {
			v.refuseType("a whole number")
		}
		return 0, false
	}
	i, err := strconv.ParseInt(n.Token.Value, 10, 64)
	if err != nil || !decimal.MatchString(n.Token.Value) {
		v.Refuse("write it in plain decimal digits", "%s is %s", v.what, Quote(n.Token.Value))
		return 0, false
	}
	return i, true
}

// Number returns a finite number, whole or not.
func (v Value) Number() (float64, bool) {
	switch n := v.node.(type) {
	case nil:
		return 0, false
	case *ast.IntegerNode:
		i, ok := v.Int()
		return float64(i), ok
	case *ast.FloatNode:
		f, err := strconv.ParseFloat(n.Token.Value, 64)
		if err == nil && !math.IsInf(f, 0) && !math.IsNaN(f) {
			return f, true
		}
	}
	v.refuseType("a number")
	return 0, false
}

// Bool returns true or false.
func (v Value) Bool() (value, ok bool) {
	if n, ok := v.node.(*ast.BoolNode); ok {
		return n.Value, true
	}
	if v.Present() {
		v.refuseType("true or false")
	}
	return false, false
}

// List returns the entries of a list.
func (v Value) List() []Value {
	n, ok := v.node.(*ast.SequenceNode)
	if !ok {
		if v.Present() {
			v.refuseType("a list")
		}
		return nil
	}
	out := make([]Value, 0, len(n.Values))
	for i, item := range n.Values {
		entry := Value{doc: v.doc, node: item, pos: position(item), what: fmt.Sprintf("entry %d of %s", i+1, v.what)}
		if _, null := item.(*ast.NullNode); null || item == nil {
			entry.Refuse("write a value or remove it", "%s is empty", entry.what)
			continue
		}
		out = append(out, entry)
	}
	return out
}

// IsList says whether the value is a list, empty or not.
func (v Value) IsList() bool {
	_, ok := v.node.(*ast.SequenceNode)
	return ok
}

// Texts returns the texts of a list.
func (v Value) Texts() []TextAt {
	var out []TextAt
	for _, entry := range v.List() {
		if s, ok := entry.Text(); ok {
			out = append(out, TextAt{entry, s})
		}
	}
	return out
}

// TextAt is a text with the value it came from.
type TextAt struct {
	Value
	Text string
}

// Key is a key that a Map may have. Example is what could follow it, for messages: a scalar or a flow list.
type Key struct {
	Name    string
	Example string
}

func (k Key) example() string { return k.Name + ": " + k.Example }

// Map is a set of keys. The zero Map has none and reports nothing.
type Map struct {
	Value
	known  []Key
	values map[string]Value
}

// Map returns a value that may have the known keys and no others. Unknown and repeated keys are reported; ok
// is false where the value is not a set of keys at all.
func (v Value) Map(known ...Key) (m Map, ok bool) {
	m = Map{Value: v, known: known, values: map[string]Value{}}
	entries, ok := v.Entries()
	for _, e := range entries {
		i := indexKey(known, e.Key.Text)
		if i < 0 {
			e.Key.Refuse(unknownFix(e.Key.Text, known), "unknown key %s in %s", Quote(e.Key.Text), v.what)
			continue
		}
		e.Value.example = known[i].example()
		if _, null := e.Value.node.(*ast.NullNode); null || e.Value.node == nil {
			e.Key.Refuse("write `"+known[i].example()+"` or remove the key", "%s has no value", e.Key.Text)
			e.Value.node = nil
		}
		m.values[e.Key.Text] = e.Value
	}
	return m, ok
}

func indexKey(known []Key, name string) int {
	for i, k := range known {
		if k.Name == name {
			return i
		}
	}
	return -1
}

func unknownFix(got string, known []Key) string {
	names := make([]string, len(known))
	for i, k := range known {
		names[i] = k.Name
	}
	if near := Nearest(got, names); near != "" {
		return "write `" + near + ":` instead"
	}
	return "write one of " + strings.Join(names, ", ") + " instead"
}

// Get returns the value of a known key; it may be absent.
func (m Map) Get(name string) Value {
	if indexKey(m.known, name) < 0 {
		panic("yamlx: asking for a key that is not known: " + name)
	}
	return m.values[name]
}

// Has says whether the key is written, with a value or without one (which is reported).
func (m Map) Has(name string) bool {
	_, written := m.values[name]
	return written
}

// Need returns the value of a known key and reports its absence.
func (m Map) Need(name string) Value {
	v := m.Get(name)
	if !m.Has(name) && m.Present() {
		m.Refuse("write `"+m.known[indexKey(m.known, name)].example()+"`", "%s is missing in %s", name, m.what)
	}
	return v
}

// Entry is a key with its value.
type Entry struct {
	Key   TextAt
	Value Value
}

// Entries returns the keys and values of a set of keys that people name themselves, each key once: repeated
// ones are reported.
func (v Value) Entries() (entries []Entry, ok bool) {
	var nodes []*ast.MappingValueNode
	switch n := v.node.(type) {
	case nil:
		return nil, false
	case *ast.MappingNode:
		nodes = n.Values
	case *ast.MappingValueNode:
		nodes = []*ast.MappingValueNode{n}
	default:
		v.refuseType("a set of keys")
		return nil, false
	}
	seen := map[string]pos{}
	for _, n := range nodes {
		key := Value{doc: v.doc, node: n.Key, pos: position(n.Key), what: "a key of " + v.what}
		name, isText := key.Text()
		if !isText {
			continue
		}
		if first, twice := seen[name]; twice {
			key.Refuse("remove one of the two", "%s is there already, in line %d", name, first.line)
			continue
		}
		seen[name] = key.pos
		value := Value{doc: v.doc, node: n.Value, pos: position(n.Value), what: name}
		if n.Value == nil {
			value.pos = key.pos
		}
		entries = append(entries, Entry{Key: TextAt{key, name}, Value: value})
	}
	return entries, true
}
