package doctor

import (
	"fmt"
	"strconv"
	"strings"
)

// version is major, minor and patch; missing parts are 0.
type version [3]int

func (v version) String() string {
	if v[2] == 0 {
		return fmt.Sprintf("%d.%d", v[0], v[1])
	}
	return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2])
}

func (v version) less(w version) bool {
	for i := range v {
		if v[i] != w[i] {
			return v[i] < w[i]
		}
	}
	return false
}

// parseVersion reads the numbers at the start of s: "6.18.44-fc" is 6.18.44.
func parseVersion(s string) (version, error) {
	var v version
	rest := s
	for i := range v {
		n := 0
		for n < len(rest) && rest[n] >= '0' && rest[n] <= '9' {
			n++
		}
		if n == 0 {
			if i == 0 {
				return v, fmt.Errorf("version %q does not begin with a number", s)
			}
			return v, nil
		}
		num, err := strconv.Atoi(rest[:n])
		if err != nil {
			return v, fmt.Errorf("version %q: %w", s, err)
		}
		v[i] = num
		var ok bool
		if rest, ok = strings.CutPrefix(rest[n:], "."); !ok {
			return v, nil
		}
	}
	return v, nil
}
