package apikey

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestAKeyLivesFromAddToRemove(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys.json")
	book, now := NewBook(path), time.Now()
	if _, ok, err := book.Find("", now); ok || err != nil {
		t.Fatalf("no keys: %v %v", ok, err)
	}
	secret, err := Add(path, "ci", []Role{RoleRead, RoleSpawn}, now.Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	k, ok, err := book.Find(secret, now)
	if !ok || err != nil || k.Name != "ci" || len(k.Roles) != 2 {
		t.Fatalf("%+v %v %v", k, ok, err)
	}
	for _, wrong := range []string{"", secret + "x", secret[:len(secret)-1], k.Hash, Prefix} {
		if _, ok, _ := book.Find(wrong, now); ok {
			t.Errorf("%q is a key", wrong)
		}
	}
	if _, ok, _ := book.Find(secret, now.Add(2*time.Hour)); ok {
		t.Error("its time is over")
	}
	raw, err := os.ReadFile(path)
	info, statErr := os.Stat(path)
	if err != nil || statErr != nil || strings.Contains(string(raw), secret) || info.Mode().Perm() != 0o600 {
		t.Errorf("the file: %v %v, mode %v, holds the key: %v", err, statErr, info.Mode(), strings.Contains(string(raw), secret))
	}
	if _, err := Add(path, "ci", []Role{RoleRead}, time.Time{}); !errors.Is(err, ErrTaken) {
		t.Errorf("twice: %v", err)
	}
	killed := filepath.Join(filepath.Dir(path), ".new-keys.json-1") // what a killed Add leaves
	if err := os.WriteFile(killed, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if found, err := Remove(path, "ci"); !found || err != nil {
		t.Errorf("remove: %v %v", found, err)
	}
	if _, err := os.Stat(killed); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an unfinished file is left: %v", err)
	}
	if _, ok, _ := book.Find(secret, now); ok {
		t.Error("a removed key still counts")
	}
}

func TestWhatCannotBeReadIsNobodysKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys.json")
	secret, err := Add(path, "ci", []Role{RoleRead}, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"{", `{"version":9,"keys":[]}`} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, ok, err := NewBook(path).Find(secret, time.Now()); ok || err == nil {
			t.Errorf("%s: %v %v", text, ok, err)
		}
		if _, err := Add(path, "b", []Role{RoleRead}, time.Time{}); err == nil {
			t.Error("keys that cannot be read were written over")
		}
	}
}

func TestOddKeysAreRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys.json")
	for name, roles := range map[string][]Role{"": {RoleRead}, "a b": {RoleRead}, "x": nil, "y": {"root"}} {
		if _, err := Add(path, name, roles, time.Time{}); err == nil {
			t.Errorf("%q %v: no error", name, roles)
		}
	}
}
