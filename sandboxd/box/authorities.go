package box

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/oklog/ulid/v2"

	"tagout/internal/authority"
)

// writeAuthorities compiles the configuration's authorities into the list that killswitchd reads, so that the
// watchdog need not know the configuration's format. Anybody may read it: names and public keys are no secrets,
// and whoever signs an order needs the box's id.
func writeAuthorities(_ context.Context, j *job) error {
	id, err := j.boxID()
	if err != nil {
		return err
	}
	raw, err := authority.List{Box: id, People: j.people}.Encode()
	if err != nil {
		return err
	}
	return j.replace(j.inst.AuthorityFile(), raw, 0o644)
}

// boxID returns the box's id, which is made once: orders that were signed for this box name it.
func (j *job) boxID() (string, error) {
	file := j.inst.BoxIDFile()
	raw, err := os.ReadFile(file)
	if err == nil {
		id, err := ulid.ParseStrict(strings.TrimSpace(string(raw)))
		if err != nil {
			return "", fmt.Errorf("%s holds no id: restore it, or remove it to get a new one: %w", file, err)
		}
		return id.String(), nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	id := ulid.MustNew(ulid.Now(), rand.Reader).String()
	return id, j.replace(file, []byte(id+"\n"), 0o644)
}
