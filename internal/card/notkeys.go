package card

import (
	"path"
	"strings"

	"tagout/internal/session"
	"tagout/internal/yamlx"
)

func readNotKeys(v yamlx.Value) []session.NotKey {
	var out []session.NotKey
	for _, entry := range v.List() {
		m, ok := entry.Map(notKeyKeys...)
		if !ok {
			continue
		}
		k := session.NotKey{Rule: readRuleID(m.Need("rule")), Reason: readSentence(m.Need("reason"), maxKeyReason)}
		switch {
		case m.Has("file") == m.Has("env"):
			entry.Refuse("write `file: /workspace/testdata/key.pem`, or `env: NAME`", "an entry names one file or one variable")
		case m.Has("file"):
			k.File = readKeyFile(m.Get("file"))
		default:
			k.Env = readEnvName(m.Get("env"))
		}
		out = append(out, k)
	}
	return out
}

// maxKeyReason bounds NotKey.Reason, in characters.
const maxKeyReason = 200

func readRuleID(v yamlx.Value) string {
	s, ok := v.Text()
	if ok && (s == "" || len(s) > 64 || strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") != "") {
		v.Refuse("write the rule that the refusal names, such as `private-key`", "%s is no rule", yamlx.Quote(s))
	}
	return s
}

func readKeyFile(v yamlx.Value) string {
	s, ok := v.Text()
	if !ok {
		return ""
	}
	if _, err := path.Match(s, ""); err != nil || !path.IsAbs(s) || path.Clean(s) != s || len(s) > maxPath || hasControl(s) {
		v.Refuse("write an absolute path in the kid, such as `/workspace/testdata/key.pem` or `/workspace/testdata/*.pem`", "%s is not a file", yamlx.Quote(s))
	}
	return s
}
