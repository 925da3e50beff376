package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"tagout/internal/instance"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// textOnly are the commands that talk to nobody and make nothing but text.
var textOnly = []string{"approve", "card", "completion", "help", "key", "openapi", "version"}

// calls has a call of every other command, with all that it needs: only whom it talks to can fail it. FILES, KID and ID stand
// for what the test has.
var calls = []struct {
	args  string
	about string
}{
	{"list", asks}, {"ls KID", asks}, {"execs KID", asks}, {"grants KID", asks}, {"tags", asks}, {"status", asks},
	{"vault ls", asks}, {"stats KID", asks}, {"exec KID -- /bin/true", asks}, {"get KID:/workspace/card.yaml -", asks},
	{"prove", asks},
	{"spawn FILES/card.yaml", changes}, {"run FILES/card.yaml -- /bin/true", changes}, {"put FILES/card.yaml KID:/workspace/x", changes},
	{"attach KID ID", changes}, {"end KID ID --reason x", changes}, {"pause KID --reason x", changes}, {"resume KID --reason x", changes},
	{"destroy KID --reason x", changes}, {"grant KID a.test:443 --for 1m --by ada --reason x", changes}, {"ungrant KID ID --by ada --reason x", changes},
	{"policy set KID --card FILES/card.yaml --by ada --reason x", changes}, {"stop --all --by ada --reason x", changes}, {"release ID --by ada --reason x", changes},
	{"vault rm x", changes}, {"vault set x --host a.test:443 --file FILES/card.yaml", changes}, {"vault rotate x --file FILES/card.yaml", changes},
	{"vault seal --plain", changes}, {"vault unlock --file FILES/card.yaml", changes}, {"vault export-recipients", asks},
	{"token ls", asks}, {"token revoke --kid KID", changes}, {"leases ls", asks}, {"issuer rotate-keys", changes},
	{"image ls", rest}, {"image gc", rest}, {"policy explain --kid KID --card FILES/card.yaml a.test:443", rest},
	{"timeline KID", rest}, {"audit search KID", rest}, {"audit index", rest}, {"evidence KID -o FILES/x.zip", rest}, {"logs KID", rest}, {"lessons", rest}, {"apikey ls", rest}, {"order FILES/card.yaml", rest}, {"mcp", rest}, {"doctor", rest}, {"setup --config FILES/card.yaml", rest},
	{"up", rest}, {"cleanup", rest}, {"contain", rest}, {"demo", rest}, {"drill", rest}, {"bench kids", rest},
}

// What calls are about.
const (
	asks    = "asks a daemon, and changes nothing"
	changes = "asks a daemon to change something"
	rest    = "is about the machine's files, or a box of its own"
)

// TestDepthIsOne: a kid's own tagout finds nothing to talk to, whatever it is asked to do, and makes no box in the kid: neither
// as a user, nor as the root of an install trial, nor where that root has made up the instance that it misses. Everything is as
// it was afterwards.
func TestDepthIsOne(t *testing.T) {
	t.Parallel()
	box := start(t)
	everyCommandIsCalled(t, box)
	program, err := os.ReadFile(filepath.Join(box.Bin, "tagout"))
	if err != nil {
		t.Fatal(err)
	}
	inputs := map[string][]byte{"tagout": program, "card.yaml": []byte(bareCard)}
	for _, image := range []string{"host", "host+writable"} {
		kid := box.Spawn(strings.Replace(bareCard, "image: host\n", "image: "+image+`
filesystem:
  tmp: 256MiB
  inputs: [{from: tagout, to: /workspace/tagout, mode: "0755"}, {from: card.yaml, to: /workspace/card.yaml}]
identity:
  notKeys:
    - {file: /workspace/tagout, rule: aws-amazon-bedrock-api-key-short-lived, reason: the rule's own text is in the program}
    - {file: /workspace/tagout, rule: generic-api-key, reason: a program has all kinds of bytes in it}
`, 1), inputs)
		before := known(box)
		for _, c := range calls {
			out := fromInside(box, kid, c.args)
			if code := out.Exit.Code; out.Exit.Result != "exited" || code == 0 || c.about != rest && code != 4 && !strings.Contains(out.Stderr, "needs root") {
				t.Errorf("%s: tagout %s, which %s: %+v", image, c.args, c.about, out)
			}
		}
		if image == "host+writable" {
			pretend(t, box, kid)
		}
		if after := known(box); after != before {
			t.Errorf("%s: afterwards\n%s\nbefore\n%s", image, after, before)
		}
		// The control: on the box itself the same calls are answered.
		for _, c := range calls {
			if c.about != asks {
				continue
			}
			args := strings.ReplaceAll(c.args, "KID", kid.Name)
			if r := box.Tagout(strings.Fields(args)...); r.Code != 0 {
				t.Errorf("on the box: tagout %s: %+v", args, r)
			}
		}
	}
}

// pretend makes up the instance in a kid, where its root may write, and asks again: there is nobody behind the sockets' names.
func pretend(t *testing.T, box *testenv.Box, kid wire.Kid) {
	t.Helper()
	slots, err := os.ReadDir("/run/tagout/.slots")
	if err != nil {
		t.Fatal(err)
	}
	line := "rm -rf /run/tagout; mkdir -p /run/tagout/.slots"
	for _, s := range slots {
		if raw, err := os.ReadFile("/run/tagout/.slots/" + s.Name()); err == nil && strings.TrimSpace(string(raw)) == box.Inst.Name() {
			line += fmt.Sprintf(" && echo %s > /run/tagout/.slots/%s", box.Inst.Name(), s.Name())
		}
	}
	if out := box.Sh(kid.Name, line+" && cat /run/tagout/.slots/*"); out.Stdout != box.Inst.Name()+"\n" {
		t.Fatalf("making up the instance: %+v", out)
	}
	for _, c := range calls {
		out := fromInside(box, kid, c.args)
		if c.about != rest && (out.Exit.Code != 4 || strings.Contains(out.Stderr, instance.ErrUnknown.Error())) {
			t.Errorf("with a made-up instance: tagout %s: %+v", c.args, out)
		}
	}
}

// known is what the box has of all that the calls would change.
func known(box *testenv.Box) string {
	box.T.Helper()
	var kids []wire.Kid
	if err := box.Client(instance.Sandboxd).Call(box.T.Context(), http.MethodGet, "/v1/kids", nil, &kids); err != nil {
		box.T.Fatal(err)
	}
	text := box.Must("tags") + box.Must("vault", "ls") + box.Must("apikey", "ls")
	for _, k := range kids {
		text += k.Name + " " + string(k.State) + "\n"
	}
	return text
}

// fromInside runs a kid's own tagout.
func fromInside(box *testenv.Box, kid wire.Kid, args string) testenv.Output {
	box.T.Helper()
	args = strings.NewReplacer("KID", kid.Name, "FILES", "/workspace", "ID", "01JD0000000000000000000000").Replace(args)
	return box.Sh(kid.Name, "timeout 20 /workspace/tagout --instance "+box.Inst.Name()+" "+args+" </dev/null")
}

// everyCommandIsCalled fails where the program has a command that the lists above leave out.
func everyCommandIsCalled(t *testing.T, box *testenv.Box) {
	t.Helper()
	known := slices.Clone(textOnly)
	for _, c := range calls {
		name, _, _ := strings.Cut(c.args, " ")
		known = append(known, name)
	}
	n := 0
	for line := range strings.Lines(box.Must("__complete", "")) {
		name, _, ok := strings.Cut(strings.TrimSpace(line), "\t")
		if !ok {
			continue
		}
		if n++; !slices.Contains(known, name) {
			t.Errorf("tagout %s is not tried in a kid: add a call of it", name)
		}
	}
	if n < 30 {
		t.Errorf("%d commands were found", n)
	}
}
