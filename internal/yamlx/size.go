package yamlx

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// Units of sizes, in bytes.
const (
	kib int64 = 1 << 10
	mib       = kib << 10
	gib       = mib << 10
)

// SizePattern is what a size looks like.
const SizePattern = `^[0-9]{1,9}(KiB|MiB|GiB)$`

var sizeRE = regexp.MustCompile(SizePattern)

// Size reads a size in bytes, a whole number with a binary unit behind it, between low and high.
func (v Value) Size(low, high int64) (int64, bool) {
	s, ok := v.Text()
	if !ok {
		return 0, false
	}
	if !sizeRE.MatchString(s) {
		fix := "write a whole number with KiB, MiB or GiB behind it, such as `64MiB`"
		if guess := strings.TrimRight(s, "bBiI "); sizeRE.MatchString(guess + "iB") {
			fix = "write `" + guess + "iB` instead"
		}
		v.Refuse(fix, "%s is not a size", Quote(s))
		return 0, false
	}
	n, _ := ParseSize(s)
	if n < low || n > high {
		v.Refuse(fmt.Sprintf("write a size from %s to %s", FormatSize(low), FormatSize(high)), "%s is out of range", s)
		return 0, false
	}
	return n, true
}

// ParseSize returns the bytes that a whole number with a binary unit behind it says, such as "64MiB".
func ParseSize(s string) (n int64, ok bool) {
	m := sizeRE.FindStringSubmatch(s)
	if m == nil {
		return 0, false
	}
	n, _ = strconv.ParseInt(strings.TrimSuffix(s, m[1]), 10, 64) // at most nine digits
	return n * map[string]int64{"KiB": kib, "MiB": mib, "GiB": gib}[m[1]], true
}

// FormatSize writes a size, a multiple of 1 KiB, as Size reads it.
func FormatSize(n int64) string {
	switch {
	case n%gib == 0:
		return strconv.FormatInt(n/gib, 10) + "GiB"
	case n%mib == 0:
		return strconv.FormatInt(n/mib, 10) + "MiB"
	}
	return strconv.FormatInt(n/kib, 10) + "KiB"
}
