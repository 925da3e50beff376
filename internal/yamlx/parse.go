package yamlx

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// maxNesting is how deep brackets and dashes may nest; the deepest known file needs 3.
const maxNesting = 16

// Parse reads data, which is called file in problems. Where it is no YAML of the accepted kind, the problem
// is in the Doc and the Value is absent, so that reading from it adds nothing.
func Parse(file string, data []byte) (*Doc, Value) {
	d := &Doc{file: file}
	none := Value{doc: d}
	if !d.checkBytes(data) {
		return d, none
	}
	root, err := parse(data)
	var at located
	switch {
	case errors.As(err, &at):
		d.add(at.line, at.col, at.fix, at.what)
		return d, none
	case root == nil:
		d.add(1, 1, "write the file's content", "the file is empty")
		return d, none
	}
	return d, Value{doc: d, node: root, pos: position(root), what: "the file"}
}

// checkBytes refuses what no YAML file of people holds and what terminals and logs would choke on.
func (d *Doc) checkBytes(data []byte) bool {
	if len(data) > MaxBytes {
		d.add(1, 1, fmt.Sprintf("keep it under %d bytes", MaxBytes), fmt.Sprintf("the file has %d bytes", len(data)))
		return false
	}
	line, col := 1, 0
	for rest := data; len(rest) > 0; {
		r, size := utf8.DecodeRune(rest)
		rest = rest[size:]
		col++
		switch {
		case r == '\n':
			line, col = line+1, 0
		case r == utf8.RuneError && size == 1:
			d.add(line, col, "save the file as UTF-8", "a byte that is not UTF-8")
			return false
		case r < 0x20 && r != '\t' && r != '\r' || r >= 0x7f && r < 0xa0:
			d.add(line, col, "remove it", fmt.Sprintf("a control character (%U)", r))
			return false
		}
	}
	return true
}

// located is a problem on its way to a Doc.
type located struct {
	line, col int
	what, fix string
}

func (l located) Error() string { return l.what }

func locate(t *token.Token, fix, what string) error {
	l := located{line: 1, col: 1, what: what, fix: fix}
	if t != nil && t.Position != nil {
		l.line, l.col = t.Position.Line, t.Position.Column
	}
	return l
}

// parse returns the root node of the only document, nil where the file is empty. The parser is a library that
// reads hostile bytes: should it panic, the file is refused like any other that cannot be read.
func parse(data []byte) (root ast.Node, err error) {
	defer func() {
		if r := recover(); r != nil {
			root, err = nil, locate(nil, "write it in a simpler form", "this is not readable as YAML")
		}
	}()
	tokens := lexer.Tokenize(string(data))
	if err := checkTokens(tokens); err != nil {
		return nil, err
	}
	f, err := parser.Parse(tokens, 0, parser.AllowDuplicateMapKey()) // duplicates are reported with the rest
	if err != nil {
		return nil, syntaxError(err)
	}
	for _, doc := range f.Docs {
		switch {
		case doc.Body == nil:
		case root != nil:
			return nil, locate(doc.Body.GetToken(), "keep one document a file", "a second document")
		default:
			root = doc.Body
		}
	}
	return root, nil
}

func syntaxError(err error) error {
	var ye yaml.Error
	if errors.As(err, &ye) {
		message, _, _ := strings.Cut(ye.GetMessage(), "\n")
		return locate(ye.GetToken(), "write valid YAML here", "YAML syntax: "+message)
	}
	return locate(nil, "write valid YAML", "this is not readable as YAML")
}

// checkTokens refuses indirection and nesting before the parser recurses into it.
func checkTokens(tokens token.Tokens) error {
	depth, dashes, line := 0, 0, 0
	for _, t := range tokens {
		if t.Position.Line != line {
			line, dashes = t.Position.Line, 0
		}
		switch t.Type {
		case token.AnchorType, token.AliasType, token.MergeKeyType:
			return locate(t, "write the value out in full", "anchors, aliases and merge keys are not allowed")
		case token.TagType, token.DirectiveType:
			return locate(t, "remove it", "tags and directives are not allowed")
		case token.MappingKeyType:
			return locate(t, "write `key: value`", "complex keys are not allowed")
		case token.SequenceStartType, token.MappingStartType:
			depth++
		case token.SequenceEndType, token.MappingEndType:
			depth--
		case token.SequenceEntryType:
			dashes++
		}
		if depth > maxNesting || dashes > maxNesting {
			return locate(t, "write it flatter", "too many levels")
		}
	}
	return nil
}

// pos is where a value or a key begins.
type pos struct{ line, col int }

func position(n ast.Node) pos {
	var t *token.Token
	switch n := n.(type) {
	case nil:
		return pos{1, 1}
	case *ast.MappingNode:
		if !n.IsFlowStyle && len(n.Values) > 0 {
			return position(n.Values[0].Key)
		}
		t = n.Start
	case *ast.MappingValueNode:
		return position(n.Key)
	default:
		t = n.GetToken()
	}
	if t == nil || t.Position == nil {
		return pos{1, 1}
	}
	return pos{t.Position.Line, t.Position.Column}
}
