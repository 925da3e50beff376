package clients

import (
	"context"
	"os"
	"strings"
	"testing"

	"tagout/internal/reason"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// TestInstallTrial runs the example card for install trials with a practice archive in the place of Debian's: apt and dpkg
// install a package with scripts of its own over the egress allowlist, its program runs, and the machine knows nothing of it.
func TestInstallTrial(t *testing.T) {
	t.Parallel()
	card, err := os.ReadFile("../../../deploy/cards/install-trial.yaml")
	if err != nil {
		t.Fatal(err)
	}
	box := testenv.Start(t)
	const about = "Package: practice-cowsay\nVersion: 1.0\nArchitecture: all\nMaintainer: Ada <ada@vendor.test>\nDescription: says something\n"
	serveRepository(t, box, about, debOf(t, about, map[string]string{
		"./usr/": "", "./usr/games/": "", "./usr/games/practice-cowsay": "#!/bin/sh\necho \"moo: $*\"\n", "./etc/": "", "./etc/practice-cowsay": "a conffile\n",
		"DEBIAN/conffiles": "/etc/practice-cowsay\n",
		"DEBIAN/postinst":  "#!/bin/sh\nset -e\nmkdir -p /var/lib/practice-cowsay\nid -u >/var/lib/practice-cowsay/who\nchown games:games /var/lib/practice-cowsay/who\n",
	}))
	box.Net.DNS.SetHost("deb.debian.org", box.Net.ShelfAddr())
	kid := box.Spawn(string(card), nil)
	run := func(line string) testenv.Output {
		t.Helper()
		out, err := box.TryExec(context.Background(), kid.Name, wire.ExecRequest{Argv: []string{"/bin/sh", "-c", line}, Timeout: patience})
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		return out
	}
	const source = `rm -f /etc/apt/sources.list.d/*; echo 'deb [trusted=yes] http://deb.debian.org/apt stable main' >/etc/apt/sources.list; `
	out := run(source + "apt-get update && apt-get install -y practice-cowsay && practice-cowsay hello")
	if out.Exit.Code != 0 || !strings.HasSuffix(out.Stdout, "moo: hello\n") {
		t.Fatalf("installing: %+v\n%s%s", out.Exit, out.Stdout, out.Stderr)
	}
	out = run(`cat /var/lib/practice-cowsay/who /etc/practice-cowsay; stat -c %U /var/lib/practice-cowsay/who; dpkg-query -W -f '${Status}\n' practice-cowsay; dpkg -V practice-cowsay`)
	if want := "0\na conffile\ngames\ninstall ok installed\n"; out.Stdout != want {
		t.Errorf("after the install: %q %q, want %q", out.Stdout, out.Stderr, want)
	}
	out = run("apt-get remove -y practice-cowsay && ! practice-cowsay hello")
	if out.Exit.Code != 0 {
		t.Errorf("removing it: %+v\n%s%s", out.Exit, out.Stdout, out.Stderr)
	}
	out = run(strings.ReplaceAll(source, "deb.debian.org", "evil.test") + "apt-get -o Acquire::Retries=0 -o APT::Update::Error-Mode=any update")
	if out.Exit.Code == 0 {
		t.Errorf("an archive that the card does not name: %s", out.Stdout)
	}
	w := world{box: box, kid: kid}
	w.wantRecord(t, attempt{name: "the other archive", code: reason.NameNotAllowed, comm: "http"})
	for _, path := range []string{"/usr/games/practice-cowsay", "/etc/practice-cowsay", "/var/lib/practice-cowsay", "/var/lib/dpkg/info/practice-cowsay.list"} {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is on the machine", path)
		}
	}
	one := box.Tagout("run", "../../../deploy/cards/install-trial.yaml", "--", "sh", "-c", source+
		"apt-get -qq update && apt-get -qq install -y practice-cowsay >/dev/null && /usr/games/practice-cowsay hello && exit 7")
	if one.Code != 7 || one.Stdout != "moo: hello\n" {
		t.Errorf("in one line: %+v", one)
	}
	if n, _ := box.Net.Attacker.Total(); n != 0 {
		t.Errorf("%d connections reached the attacker", n)
	}
	box.Destroy(kid.Name)
}
