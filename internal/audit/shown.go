package audit

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Shown is a text as it stands, or quoted as Go quotes strings where it holds anything but printable characters, or what
// would make it look quoted. Names that a kid chose go through it: any byte can be in them.
func Shown(s string) string {
	if utf8.ValidString(s) && !strings.ContainsAny(s, "\"\\") && strings.IndexFunc(s, unprintable) < 0 {
		return s
	}
	return strconv.Quote(s)
}

func unprintable(c rune) bool { return !unicode.IsPrint(c) }

// Line writes arguments one after the other, each as Shown has it and quoted too where it holds a space or nothing, so
// that they can be told apart whatever bytes are in them.
func Line(args []string) string {
	out := make([]string, len(args))
	for i, arg := range args {
		if out[i] = Shown(arg); out[i] == arg && (arg == "" || strings.Contains(arg, " ")) {
			out[i] = strconv.Quote(arg)
		}
	}
	return strings.Join(out, " ")
}
