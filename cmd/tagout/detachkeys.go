package main

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// detachKeys are keys that, typed one after the other, leave a command. It is their flag's value, too.
type detachKeys struct {
	text string
	keys []byte
	held []byte // typed, and perhaps the beginning of them
}

const maxDetachKeys = 8

func defaultDetachKeys() detachKeys { return detachKeys{text: "ctrl-],d", keys: []byte{0x1d, 'd'}} }

func (d *detachKeys) add(cmd *cobra.Command) {
	cmd.Flags().Var(d, "detach-keys", "with a terminal: keys that leave the command running; \"\" for none")
}

// String implements pflag.Value.
func (d *detachKeys) String() string { return d.text }

// Type implements pflag.Value.
func (d *detachKeys) Type() string { return "KEY,KEY" }

// Set implements pflag.Value.
func (d *detachKeys) Set(text string) error {
	var keys []byte
	for name := range strings.SplitSeq(text, ",") {
		if text == "" {
			break
		}
		key, err := keyNamed(name)
		if err != nil {
			return err
		}
		keys = append(keys, key)
	}
	if len(keys) > maxDetachKeys {
		return fmt.Errorf("%d keys: give at most %d", len(keys), maxDetachKeys)
	}
	*d = detachKeys{text: text, keys: keys}
	return nil
}

// keyNamed returns what a terminal sends for a key.
func keyNamed(name string) (byte, error) {
	if len(name) == 1 && name[0] > ' ' && name[0] < 0x7f {
		return name[0], nil
	}
	if c, ok := strings.CutPrefix(strings.ToLower(name), "ctrl-"); ok && len(c) == 1 {
		if c := strings.ToUpper(c)[0]; c >= '@' && c <= '_' {
			return c - '@', nil
		}
	}
	return 0, fmt.Errorf("%q is no key: give a character, or ctrl- and a letter or one of @[\\]^_", name)
}

// scan takes what is typed and returns what of it goes to the command. leave says that the keys are complete; what follows
// them is dropped.
func (d *detachKeys) scan(typed []byte) (out []byte, leave bool) {
	if len(d.keys) == 0 {
		return typed, false
	}
	for _, b := range typed {
		d.held = append(d.held, b)
		for !bytes.HasPrefix(d.keys, d.held) {
			out, d.held = append(out, d.held[0]), d.held[1:]
		}
		if len(d.held) == len(d.keys) {
			return out, true
		}
	}
	return out, false
}
