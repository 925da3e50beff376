package config

import (
	"slices"
	"strings"
	"time"
	"unicode"

	"tagout/internal/authority"
	"tagout/internal/yamlx"
)

// Authority is a named person who may give orders.
type Authority struct {
	Name       string
	Roles      []string  // of spawn, grant, stop, release, host-network; never empty
	Key        string    // public key as `tagout key new` prints it; empty: this person signs nothing
	ValidUntil time.Time // wall clock, UTC, whole seconds; zero: no end
}

// May says whether the person holds the role at now, wall clock.
func (a Authority) May(role string, now time.Time) bool { return a.person().May(role, now) }

func (a Authority) person() authority.Person {
	return authority.Person{Name: a.Name, Roles: a.Roles, Key: a.Key, ValidUntil: a.ValidUntil}
}

// May says whether the configuration names somebody with that role. A box without authorities gives no role
// to anybody.
func (b *Box) May(name, role string) bool {
	return slices.ContainsFunc(b.Authorities, func(a Authority) bool {
		return a.Name == name && slices.Contains(a.Roles, role)
	})
}

// People returns the authorities as killswitchd's list holds them.
func (b *Box) People() []authority.Person {
	var out []authority.Person
	for _, a := range b.Authorities {
		out = append(out, a.person())
	}
	return out
}

// authorityFile is an Authority's form in the file.
type authorityFile struct {
	Name       string   `yaml:"name"`
	Roles      []string `yaml:"roles"`
	Key        string   `yaml:"key,omitempty"`
	ValidUntil string   `yaml:"validUntil,omitempty"`
}

func (a Authority) file() authorityFile {
	f := authorityFile{Name: a.Name, Roles: a.Roles, Key: a.Key}
	if !a.ValidUntil.IsZero() {
		f.ValidUntil = a.ValidUntil.UTC().Format(time.RFC3339)
	}
	return f
}

var (
	authorityKeys = []yamlx.Key{
		{Name: "name", Example: `"Ada Operator"`},
		{Name: "roles", Example: "[stop, release]"},
		{Name: "key", Example: "Ada_Operator+…"},
		{Name: "validUntil", Example: "2030-12-31"},
	}
	roles = []string{RoleSpawn, RoleGrant, RoleStop, RoleRelease, RoleHost}
)

func readAuthorities(v yamlx.Value) []Authority {
	var out []Authority
	for _, entry := range v.List() {
		m, ok := entry.Map(authorityKeys...)
		if !ok {
			continue
		}
		a := Authority{Roles: readRoles(m.Need("roles")), Name: readPerson(m.Need("name"), out), ValidUntil: readEnd(m.Get("validUntil"))}
		a.Key = readKey(m.Get("key"), a.Name, out)
		out = append(out, a)
	}
	return out
}

func readPerson(v yamlx.Value, before []Authority) string {
	s, ok := v.Text()
	switch {
	case !ok:
	case strings.TrimSpace(s) != s || s == "" || len([]rune(s)) > 64 || strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) >= 0:
		v.Refuse("write the person's name in 1 to 64 printable characters", "%s cannot name an authority", yamlx.Quote(s))
	case slices.ContainsFunc(before, func(o Authority) bool { return o.Name == s }):
		v.Refuse("put all roles into one entry", "%s is in this list already", yamlx.Quote(s))
	}
	return s
}

// readKey refuses a key that another person has: two people with one key are one. What is refused is not quoted:
// it may be a private key.
func readKey(v yamlx.Value, person string, before []Authority) string {
	s, ok := v.Text()
	if !ok {
		return ""
	}
	if err := authority.CheckKey(s, person); err != nil {
		v.Refuse("write what `tagout key new` printed for this person", "the key cannot be used: %v", err)
		return ""
	}
	if i := slices.IndexFunc(before, func(o Authority) bool { return authority.SameKey(o.Key, s) }); i >= 0 {
		v.Refuse("make each person a key with `tagout key new`", "%s has this key already", yamlx.Quote(before[i].Name))
	}
	return s
}

// readEnd reads a day, of which all is still good, or a moment.
func readEnd(v yamlx.Value) time.Time {
	s, ok := v.Text()
	if !ok {
		return time.Time{}
	}
	if day, err := time.Parse(time.DateOnly, s); err == nil {
		return day.AddDate(0, 0, 1)
	}
	at, err := time.Parse(time.RFC3339, s)
	if err != nil {
		v.Refuse("write a day, such as `2030-12-31`, or a moment, such as `2030-12-31T18:00:00Z`", "%s is not a date", yamlx.Quote(s))
		return time.Time{}
	}
	return at.UTC().Truncate(time.Second)
}

func readRoles(v yamlx.Value) []string {
	var out []string
	texts := v.Texts()
	if v.IsList() && len(texts) == 0 {
		v.Refuse("write at least one of "+strings.Join(roles, ", "), "the list of roles is empty")
	}
	for _, at := range texts {
		switch {
		case !slices.Contains(roles, at.Text):
			fix := "write one of " + strings.Join(roles, ", ") + " instead"
			if near := yamlx.Nearest(at.Text, roles); near != "" {
				fix = "write `" + near + "` instead"
			}
			at.Refuse(fix, "unknown role %s", yamlx.Quote(at.Text))
		case slices.Contains(out, at.Text):
			at.Refuse("remove it", "%s is in this list already", at.Text)
		default:
			out = append(out, at.Text)
		}
	}
	return out
}
