package authority

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestGrantorFlag: a name opens something only where no key that counts now is held by somebody who may.
func TestGrantorFlag(t *testing.T) {
	t.Parallel()
	may, other, gone := makePerson(t, "ada", RoleGrant), makePerson(t, "bob", RoleStop), makePerson(t, "eve", RoleGrant)
	gone.ValidUntil = now.Add(-time.Hour)
	nameOnly := Person{Name: "joe", Roles: []string{RoleGrant}}
	for want, lists := range map[string][][]Person{
		"--key FILE": {{may.Person}, {nameOnly, other.Person, may.Person}},
		"--by NAME":  {{}, {nameOnly}, {other.Person, gone.Person}},
	} {
		for _, people := range lists {
			path := filepath.Join(t.TempDir(), "authorities.json")
			raw, err := List{Box: box, People: people}.Encode()
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, raw, 0o644); err != nil {
				t.Fatal(err)
			}
			if got := NewBook(path, os.Getuid()).GrantorFlag(now); got != want {
				t.Errorf("%+v: %s, want %s", people, got, want)
			}
		}
	}
	if got := NewBook(filepath.Join(t.TempDir(), "none"), os.Getuid()).GrantorFlag(now); got != "--key FILE" {
		t.Errorf("without a list: %s", got)
	}
}
