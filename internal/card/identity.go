package card

import (
	"regexp"
	"strings"

	"tagout/internal/session"
	"tagout/internal/yamlx"
)

func readIdentity(v yamlx.Value) Identity {
	m, _ := v.Map(identityKeys...)
	scope := readScope(m.Get("scope"))
	return Identity{
		Scope: scope, Mint: readMints(m.Get("mint"), scope),
		Lifetime: readDuration(m.Get("lifetime"), minLife, maxLife), NotKeys: readNotKeys(m.Get("notKeys")),
	}
}

func readScope(v yamlx.Value) []session.Secret {
	var out []session.Secret
	for _, entry := range v.List() {
		sm, ok := entry.Map(secretKeys...)
		if !ok {
			continue
		}
		s := session.Secret{Name: readSecretName(sm.Need("secret")), Env: readEnvName(sm.Need("env"))}
		for _, other := range out {
			if s.Name != "" && s.Name == other.Name {
				sm.Get("secret").Refuse("remove it", "the secret %s is in the scope already", s.Name)
			}
			if s.Env != "" && s.Env == other.Env {
				sm.Get("env").Refuse("write another name", "the variable %s is taken already", s.Env)
			}
		}
		out = append(out, s)
	}
	return out
}

func readSecretName(v yamlx.Value) string {
	name, ok := v.Text()
	switch {
	case !ok:
		return ""
	case NeverGranted(name):
		v.Refuse("remove it", "secrets whose names begin with %s can never be granted", neverPrefix)
	case looksSecret(name):
		v.Refuse("write the name that the secret has in the vault, never its value", "this looks like a secret's value")
		return ""
	case !secretRE.MatchString(name):
		v.Refuse("write the name that the secret has in the vault: lower-case letters, digits and underscores", "%s cannot name a secret", yamlx.Quote(name))
	}
	return name
}

func readEnvName(v yamlx.Value) string {
	name, ok := v.Text()
	if ok && !envRE.MatchString(name) {
		v.Refuse("write letters, digits and underscores, such as `VENDOR_API_KEY`", "%s cannot name a variable", yamlx.Quote(name))
		return ""
	}
	return name
}

// maxEnvValue is well below the kernel's 128 KiB for one string (MAX_ARG_STRLEN).
const maxEnvValue = 32 << 10

func (c *Card) readEnv(v yamlx.Value) {
	entries, _ := v.Entries()
	for _, e := range entries {
		name := readEnvName(e.Key.Value)
		value, ok := e.Value.Text()
		if name == "" || !ok {
			continue
		}
		switch {
		case looksSecret(value):
			e.Value.Refuse("put the secret into the vault and name it in identity.scope", "the value of %s looks like a secret", name)
		case len(value) > maxEnvValue || strings.Contains(value, "\x00"):
			e.Value.Refuse("write a shorter plain text", "the value of %s is too long or contains a NUL byte", name)
		}
		for _, s := range c.Identity.Scope {
			if s.Env == name {
				e.Key.Refuse("remove it from one of the two", "%s carries the token of the secret %s (identity.scope)", name, s.Name)
			}
		}
		for _, t := range c.Identity.Mint {
			if t.Env == name {
				e.Key.Refuse("remove it from one of the two", "%s carries the token %s (identity.mint)", name, t.Name)
			}
		}
		c.Env[name] = value
	}
}

// secretForms are the beginnings of well-known credentials. This catches a slip of the hand, not a liar: what
// a card's author wants to give away, they can.
var secretForms = regexp.MustCompile(`(?:\b|_)(?:` +
	`sk-[A-Za-z0-9_-]{16,}|(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{8,}|whsec_[A-Za-z0-9]{8,}` + // OpenAI, Anthropic, Stripe
	`|gh[opusr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}` + // GitHub, GitLab
	`|xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}` + // Slack
	`|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{16,}` + // AWS, Google
	`|(?:hf|npm|dop_v1|tgo)_[A-Za-z0-9]{20,}|pypi-[A-Za-z0-9_-]{16,}|SG\.[A-Za-z0-9_-]{16,}\.` + // others, and Tagout's tokens
	`|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}` + // JWT
	`)|-----BEGIN [A-Z ]*PRIVATE KEY|AGE-SECRET-KEY-1|://[^/\s:@]+:[^/\s:@]+@`)

func looksSecret(s string) bool { return secretForms.MatchString(s) }
