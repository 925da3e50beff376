package seal

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"filippo.io/age"
)

func TestWhatIsSealedIsReadByItsIdentityAlone(t *testing.T) {
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	other, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	r, err := Recipient(id.Recipient().String())
	if err != nil {
		t.Fatal(err)
	}
	var sealed bytes.Buffer
	if err := Encrypt(&sealed, bytes.NewReader([]byte("a record\n")), r); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "id")
	if err := os.WriteFile(file, []byte("# a comment\n"+id.String()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ids, err := Identities(file)
	if err != nil {
		t.Fatal(err)
	}
	open, err := With(ids...)(bytes.NewReader(sealed.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(open); err != nil || string(text) != "a record\n" {
		t.Errorf("%q %v", text, err)
	}
	if _, err := With(other)(bytes.NewReader(sealed.Bytes())); err == nil {
		t.Error("another identity opens it")
	}
}

// TestTheExampleCanBeUsed: a box with the example's recipients would start.
func TestTheExampleCanBeUsed(t *testing.T) {
	raw, err := os.ReadFile("../../../deploy/box.example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	keys := regexp.MustCompile(`age1[a-z0-9]{20,}`).FindAllString(string(raw), -1)
	if len(keys) == 0 {
		t.Fatal("the example names no recipient")
	}
	for _, k := range keys {
		if _, err := Recipient(k); err != nil {
			t.Errorf("%s: %v", k, err)
		}
	}
}
