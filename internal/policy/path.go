package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"tagout/internal/reason"
)

// pathError says why a request path is refused: ambiguous where a server could read it in another way than
// Tagout, plainly denied otherwise.
type pathError struct {
	code    reason.Code
	problem string
}

func (e *pathError) Error() string { return e.problem }

func ambiguous(problem string) error { return &pathError{reason.AmbiguousHTTP, problem} }

// Encoded slashes. Some servers take them for a slash and some for a byte of the segment, so a star never stands for
// one, and a path with one passes only where a rule spells it out: then both readings are what the rule says. npm's
// scoped packages (/@scope%2Fname) need that.
const (
	encodedSlash = "%2F"  // in a glob
	slashMark    = "\x00" // in a canonical path: no other path has this byte
)

// CheckPathGlob says whether a rule's paths may list glob. A glob begins with a slash and is written
// decoded, but for encoded slashes. A star at its end stands for anything, slashes included; any other star for a
// run of characters other than a slash. No star stands for an encoded slash.
func CheckPathGlob(glob string) error {
	switch plain := strings.ReplaceAll(glob, encodedSlash, ""); {
	case !strings.HasPrefix(glob, "/"):
		return fmt.Errorf("path %q does not begin with a slash", cut(glob, 80))
	case strings.ContainsAny(plain, "?#"):
		return fmt.Errorf("path %q contains ? or #: it is compared without the query", cut(glob, 80))
	case strings.Contains(plain, "%"):
		return fmt.Errorf("path %q contains a percent sign: it is compared decoded, and only a slash can be spelled, as %s", cut(glob, 80), encodedSlash)
	}
	if _, err := canonical(glob); err != nil {
		return fmt.Errorf("path %q can never match: %w", cut(glob, 80), err)
	}
	return nil
}

// PathMatches says whether a request target in origin form matches one of the globs and can be read in one way only.
func PathMatches(globs []string, raw string) bool {
	path, err := canonical(raw)
	return err == nil && matchAny(globs, path)
}

// PathGlobs returns those of the globs that a request target in origin form matches, none where it can be read in more ways
// than one.
func PathGlobs(globs []string, raw string) []string {
	if len(globs) == 0 {
		return nil
	}
	path, err := canonical(raw)
	if err != nil {
		return nil
	}
	var out []string
	for _, glob := range globs {
		if matchGlob(glob, path) {
			out = append(out, glob)
		}
	}
	return out
}

func matchAny(globs []string, path string) bool {
	return slices.ContainsFunc(globs, func(glob string) bool { return matchGlob(glob, path) })
}

// Path returns the canonical path of a request target in origin form: without the query, percent-decoded
// exactly once. Nothing is resolved or merged; what a server might resolve, merge or decode again is an
// error instead: dot segments in any spelling, encoded or doubled slashes, backslashes, NUL and other
// control bytes, percent signs that still encode something, bytes that are not UTF-8 (overlong dots).
// Decoded dot segments written plainly are errors too.
func Path(raw string) (string, error) {
	path, err := canonical(raw)
	if err == nil && strings.Contains(path, slashMark) {
		return "", errEncodedSlash
	}
	return path, err
}

var errEncodedSlash = ambiguous("the path has an encoded slash")

// canonical is Path for paths with encoded slashes too: slashMark stands for each. They end a segment, as they do
// for the servers that decode them.
func canonical(raw string) (string, error) {
	raw, _, _ = strings.Cut(raw, "?")
	if !strings.HasPrefix(raw, "/") {
		return "", ambiguous("the path does not begin with a slash")
	}
	path, err := decodeOnce(raw)
	if err != nil {
		return "", err
	}
	if !utf8.ValidString(path) {
		return "", ambiguous("the path is not UTF-8")
	}
	for rest := path[1:]; rest != ""; {
		segment, after := rest, ""
		end := strings.IndexAny(rest, "/"+slashMark)
		if end >= 0 {
			segment, after = rest[:end], rest[end+1:]
		}
		if segment == "" {
			return "", ambiguous("the path has an empty segment")
		}
		// Servers with path parameters (RFC 3986, 3.3) drop what follows the semicolon before they resolve
		// dots; others drop blanks and dots at the end of a segment.
		if name, _, _ := strings.Cut(segment, ";"); strings.Trim(name, ". ") == "" {
			if segment != "." && segment != ".." || strings.Contains(raw, "%") {
				return "", ambiguous("the path has a hidden dot segment")
			}
			return "", &pathError{reason.PathDenied, "the path has a dot segment"}
		}
		rest = after
	}
	return path, nil
}

// decodeOnce decodes percent escapes; those of slashes become slashMark.
func decodeOnce(raw string) (string, error) {
	var out strings.Builder
	out.Grow(len(raw))
	for i := 0; i < len(raw); i++ {
		c := raw[i]
		if c == '%' {
			v, ok := unhex(raw, i)
			if !ok {
				return "", ambiguous("the path has a broken percent escape")
			}
			i += 2
			if v == '/' {
				out.WriteString(slashMark)
				continue
			}
			c = v
		}
		if c < 0x20 || c == 0x7f || c == ' ' && raw[i] == ' ' {
			return "", ambiguous("the path has a control byte or a blank")
		}
		if c == '\\' || c == '#' || c == '?' {
			return "", ambiguous("the path has a backslash, a fragment or an encoded question mark")
		}
		out.WriteByte(c)
	}
	path := out.String()
	for i := range len(path) {
		if _, ok := unhex(path, i); ok {
			return "", ambiguous("the path is encoded twice")
		}
	}
	return path, nil
}

// unhex reads the percent escape at s[i:].
func unhex(s string, i int) (byte, bool) {
	if i+2 >= len(s) || s[i] != '%' {
		return 0, false
	}
	var v byte
	for _, c := range []byte{s[i+1], s[i+2]} {
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c|0x20 && c|0x20 <= 'f':
			c = c | 0x20 - 'a' + 10
		default:
			return 0, false
		}
		v = v<<4 | c
	}
	return v, true
}

// matchGlob says whether a path of canonical matches a glob of CheckPathGlob.
func matchGlob(glob, path string) bool {
	glob = strings.ReplaceAll(glob, encodedSlash, slashMark)
	prefix, open := strings.CutSuffix(glob, "*")
	if !open {
		return matchParts(strings.Split(glob, "*"), path, false)
	}
	return matchParts(strings.Split(prefix, "*"), path, true)
}

// matchParts matches literal parts with one star between each two of them; open lets anything follow but encoded
// slashes. It needs no backtracking: taking each part at its first place leaves the most for the rest, except for
// the last part of a closed glob, which must stand at the end; and a part with a slash of either kind has no second
// place, since the star in front of it would have to stand for that slash.
func matchParts(parts []string, path string, open bool) bool {
	rest, ok := strings.CutPrefix(path, parts[0])
	if !ok {
		return false
	}
	for i, part := range parts[1:] {
		last := i == len(parts)-2
		if last && !open {
			gap, ok := strings.CutSuffix(rest, part)
			return ok && !strings.ContainsAny(gap, "/"+slashMark)
		}
		gap, after, found := strings.Cut(rest, part)
		if !found || strings.ContainsAny(gap, "/"+slashMark) {
			return false
		}
		rest = after
	}
	return rest == "" || open && !strings.Contains(rest, slashMark)
}

// CheckMethod says whether a rule may list method: an upper-case token that opens no tunnel and echoes no
// credential.
func CheckMethod(method string) error {
	if method == "" || len(method) > 32 {
		return errors.New("a method has 1 to 32 letters")
	}
	for i := range len(method) {
		if c := method[i]; (c < 'A' || c > 'Z') && c != '-' && c != '_' {
			return fmt.Errorf("method %q is not in capital letters", cut(method, 40))
		}
	}
	if forbiddenMethod(method) {
		return fmt.Errorf("method %s can never be allowed", method)
	}
	return nil
}

// forbiddenMethod: CONNECT and CONNECT-UDP would open a tunnel inside an inspected connection; TRACE and
// TRACK make the server send the injected credential back to the kid.
func forbiddenMethod(method string) bool {
	switch strings.ToUpper(method) {
	case "CONNECT", "CONNECT-UDP", "CONNECT-IP", "TRACE", "TRACK":
		return true
	}
	return false
}
