package e2e

import (
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"tagout/internal/audit"
	"tagout/internal/authority"
	"tagout/internal/authority/keyfile"
	"tagout/internal/config"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/reason"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// TestAuthorityStories runs the operators' commands as people type them, against real daemons (S16).
func TestAuthorityStories(t *testing.T) {
	t.Parallel()
	box := testenv.StartWith(t, func(cfg *config.Box) { cfg.Authorities = nil })
	path := box.Bin + string(os.PathListSeparator) + os.Getenv("PATH")
	testscript.Run(t, testscript.Params{
		Dir: "testdata/authority",
		Setup: func(env *testscript.Env) error {
			// The commands find their instance in the environment of a small wrapper.
			dir := filepath.Join(env.WorkDir, ".bin")
			if err := os.Mkdir(dir, 0o700); err != nil {
				return err
			}
			env.Setenv("PATH", dir+string(os.PathListSeparator)+path)
			script := "#!/bin/sh\nexec " + filepath.Join(box.Bin, "tagout") + " --instance " + box.Inst.Name() + " \"$@\"\n"
			return os.WriteFile(filepath.Join(dir, "tagout"), []byte(script), 0o700)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code": func(ts *testscript.TestScript, _ bool, args []string) { wantCode(ts, args) },
			"know": func(ts *testscript.TestScript, _ bool, args []string) { know(ts, box, args[0], args[1], args[2]) },
			"kill9": func(_ *testscript.TestScript, _ bool, args []string) {
				box.Kill9(args[0])
				box.WaitHealthy(instance.Killswitchd)
			},
			// tag sets STOP to the id of the tag that somebody placed.
			"tag": func(ts *testscript.TestScript, _ bool, args []string) {
				var tags []wire.Tag
				if err := json.Unmarshal([]byte(box.Must("tags", "--json")), &tags); err != nil {
					ts.Fatalf("%v", err)
				}
				for _, tag := range tags {
					if strings.HasPrefix(tag.By, args[0]) {
						ts.Setenv("STOP", tag.Stop)
						return
					}
				}
				ts.Fatalf("no tag of %s: %+v", args[0], tags)
			},
		},
	})
}

func wantCode(ts *testscript.TestScript, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	var exit *exec.ExitError
	if err := ts.Exec(args[1], args[2:]...); errors.As(err, &exit) {
		got = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

// know puts a person's key into the box's configuration and runs setup again: the running killswitchd takes it.
func know(ts *testscript.TestScript, box *testenv.Box, key, name, roles string) {
	cfg, err := config.Load(box.Inst.BoxConfig())
	ts.Check(err)
	public, err := keyfile.Public(ts.MkAbs(key))
	ts.Check(err)
	cfg.Authorities = append(cfg.Authorities, config.Authority{Name: name, Roles: strings.Split(roles, ","), Key: public})
	raw, err := cfg.Marshal()
	ts.Check(err)
	file := ts.MkAbs("box.yaml")
	ts.Check(os.WriteFile(file, raw, 0o600))
	box.Must("setup", "--config", file)
}

// TestOrdersThatAreRefused gives killswitchd orders that it must not carry out; each refusal says why and is on record.
func TestOrdersThatAreRefused(t *testing.T) {
	t.Parallel()
	box := start(t)
	stop := authority.Order{Action: authority.ActionStop, Scope: wire.Scope{All: true}, Via: authority.ViaFleet}
	good := box.Sign(stop, practice.Authority)
	rep, err := box.SignedStop(good)
	if err != nil || rep == nil || rep.State != wire.StateObserved || rep.Tag.Cause != "fleet" || rep.Tag.Order == "" {
		t.Fatalf("%+v, %v", rep, err)
	}
	changed := wire.SignedOrder{Note: strings.Replace(good.Note, `"all":true`, `"kid":"a"`, 1)}
	private, _, err := authority.NewKey(practice.Authority) // the name fits, the key is another
	if err != nil {
		t.Fatal(err)
	}
	list, err := authority.NewBook(box.Inst.AuthorityFile(), 0).List()
	if err != nil {
		t.Fatal(err)
	}
	sign := func(key string, o authority.Order, at time.Time) wire.SignedOrder {
		o.Box, o.By, o.Reason = list.Box, practice.Authority, "test"
		raw, err := authority.Sign(authority.New(o, at, authority.Life), key)
		if err != nil {
			t.Fatal(err)
		}
		return wire.SignedOrder{Note: string(raw)}
	}
	ada := box.Net.Key(practice.Authority)
	for name, c := range map[string]struct {
		order wire.SignedOrder
		code  reason.Code
	}{
		"replayed":     {good, reason.OrderReplayed},
		"changed":      {changed, reason.OrderKey},
		"another key":  {sign(private, stop, time.Now()), reason.OrderKey},
		"expired":      {sign(ada, stop, time.Now().Add(-time.Hour)), reason.OrderExpired},
		"from later":   {sign(ada, stop, time.Now().Add(time.Hour)), reason.OrderExpired},
		"without role": {box.Sign(stop, practice.Third), reason.OrderRole},
		"no order":     {wire.SignedOrder{Note: "stop"}, reason.OrderInvalid},
	} {
		_, err := box.SignedStop(c.order)
		var no *control.Error
		if !errors.As(err, &no) || no.Problem.Reason != c.code {
			t.Errorf("%s: %v, want %s", name, err, c.code)
			continue
		}
		box.WaitRecord(name+" on record", func(r *audit.Record) bool {
			return r.Event == audit.EventOrderRefused && r.Reason == c.code && r.Detail == no.Problem.Detail && r.Outcome == audit.OutcomeDeny
		})
	}
	// The list is gone: no key counts, and root stops without one.
	if err := os.Remove(box.Inst.AuthorityFile()); err != nil {
		t.Fatal(err)
	}
	if _, err := box.Deliver(sign(ada, authority.Order{Action: authority.ActionRelease, Stop: rep.Stop}, time.Now())); err == nil || !strings.Contains(err.Error(), "no key counts") {
		t.Errorf("released without a list: %v", err)
	}
	if rep := box.Stop(wire.StopRequest{Scope: wire.Scope{All: true}}); rep.State != wire.StateObserved || rep.Tag.Peer != "uid:0" {
		t.Errorf("an unsigned stop: %+v", rep)
	}
}

// TestRefusalsUnderATagSayWhoAndWhy: whatever is refused because of a tag carries the tag's text, and nothing of it is
// refused before the tag hangs.
func TestRefusalsUnderATagSayWhoAndWhy(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(card, hostile(t, box))
	seq := uint32(4000) // far from those of kids
	ways := map[string]func() error{
		"exec": func() error {
			_, err := box.TryExec(t.Context(), kid.Name, wire.ExecRequest{Argv: []string{"/bin/true"}})
			return err
		},
		"spawn": func() error {
			k, err := box.TrySpawn("", card, hostile(t, box))
			if err == nil {
				box.Destroy(k.Name)
			}
			return err
		},
		"grant": func() error {
			_, err := grant(t, box, kid.Name, wire.GrantRequest{Host: "new.vendor.test", Port: 443, For: time.Second})
			return err
		},
		"policy": func() error {
			_, err := setPolicy(t, box, kid.Name, card)
			return err
		},
		"tokens": func() error {
			seq++
			name := "m" + strconv.Itoa(int(seq))
			return box.Client(instance.Credd).Call(t.Context(), http.MethodPost, "/v1/sessions",
				wire.MintRequest{Kid: name, Session: name, Card: kid.Card, Mark: box.Inst.SessionMark(seq)}, nil)
		},
	}
	for what, try := range ways {
		if err := try(); err != nil {
			t.Fatalf("%s without a tag: %v", what, err)
		}
	}
	rep := box.Stop(wire.StopRequest{Scope: wire.Scope{Card: kid.Card}, By: practice.Authority, Reason: "it sends mail"})
	for what, try := range ways {
		err := try()
		if control.Status(err) != http.StatusLocked {
			t.Errorf("%s: %v, want 423", what, err)
			continue
		}
		for _, want := range []string{practice.Authority, "it sends mail", rep.Stop} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q does not say %q", what, err, want)
			}
		}
	}
	if r := box.Tagout("exec", kid.Name, "--", "/bin/true"); r.Code != 3 || !strings.Contains(r.Stderr, "it sends mail") {
		t.Errorf("tagout exec: %d, %q", r.Code, r.Stderr)
	}
}
