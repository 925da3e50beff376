package kids

import (
	"encoding/json"
	"slices"
	"strings"

	"tagout/internal/policy"
)

// difference says in a record which rules a policy has lost and gained, one a line; a rule that was changed is in both.
func difference(before, after policy.Spec, fields map[string]string) {
	was, is := rulesOf(before), rulesOf(after)
	for name, of := range map[string][2][]string{"before": {was, is}, "after": {is, was}} {
		own := slices.DeleteFunc(slices.Clone(of[0]), func(r string) bool { return slices.Contains(of[1], r) })
		if len(own) > 0 {
			fields[name] = strings.Join(own, "\n")
		}
	}
}

// rulesOf writes rules down without their places in the card, which say nothing of what they allow.
func rulesOf(s policy.Spec) []string {
	var out []string
	for _, r := range s.Allow {
		r.Line = 0
		out = append(out, "allow "+inJSON(r))
	}
	for _, r := range s.Deny {
		r.Line = 0
		out = append(out, "deny "+inJSON(r))
	}
	return out
}

func inJSON(v any) string {
	raw, err := json.Marshal(v)
	if err != nil {
		return err.Error() // no rule fails
	}
	return string(raw)
}
