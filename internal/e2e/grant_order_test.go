package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/authority"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// TestGrantsAreSigned (invariant 10): opening something for a kid takes the signature of somebody with the role, for
// this box, now and once. What is refused is on record and opens nothing.
func TestGrantsAreSigned(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(bareCard, nil)
	door := authority.Order{Action: authority.ActionGrant, Kid: kid.Name, Door: authority.Door{Host: "files.vendor.test", Port: 80, For: time.Hour}}
	deliver := func(daemon string, o wire.SignedOrder, out any) error {
		return box.Client(daemon).Call(t.Context(), http.MethodPost, "/v1/order", o, out)
	}
	refused := func(name string, code reason.Code, err error) {
		t.Helper()
		var no *control.Error
		if !errors.As(err, &no) || no.Problem.Reason != code {
			t.Errorf("%s: %v, want %s", name, err, code)
			return
		}
		box.WaitRecord(name+" on record", func(r *audit.Record) bool {
			return r.Event == audit.EventOrderRefused && r.Reason == code && r.Detail == no.Problem.Detail && r.Outcome == audit.OutcomeDeny
		})
		if reaches(box, kid.Name) {
			t.Fatalf("%s: it opened the door", name)
		}
	}
	_, err := grant(t, box, kid.Name, wire.GrantRequest{Host: "files.vendor.test", Port: 80, For: time.Hour, By: practice.Authority, Reason: "r"})
	refused("a grant without a signature", reason.OrderUnsigned, err)
	err = box.Client(instance.Sandboxd).Call(t.Context(), http.MethodPut, "/v1/kids/"+kid.Name+"/policy",
		wire.PolicyRequest{Card: card, By: practice.Authority, Reason: "r"}, nil)
	refused("a policy without a signature", reason.OrderUnsigned, err)
	list, err := authority.NewBook(box.Inst.AuthorityFile(), 0).List()
	if err != nil {
		t.Fatal(err)
	}
	sign := func(key string, at time.Time) wire.SignedOrder {
		o := door
		o.Box, o.By, o.Reason = list.Box, practice.Authority, "test"
		raw, err := authority.Sign(authority.New(o, at, authority.Life), key)
		if err != nil {
			t.Fatal(err)
		}
		return wire.SignedOrder{Note: string(raw)}
	}
	stranger, _, err := authority.NewKey(practice.Authority)
	if err != nil {
		t.Fatal(err)
	}
	good := box.Sign(door, practice.Authority)
	stop := box.Sign(authority.Order{Action: authority.ActionStop, Scope: wire.Scope{Kid: kid.Name}}, practice.Authority)
	policy := box.Sign(authority.Order{Action: authority.ActionPolicy, Kid: kid.Name, Card: strings.Repeat("0", 64)}, practice.Authority)
	policy.Card = card
	refused("an unknown key", reason.OrderKey, deliver(instance.Sandboxd, sign(stranger, time.Now()), nil))
	refused("expired", reason.OrderExpired, deliver(instance.Sandboxd, sign(box.Net.Key(practice.Authority), time.Now().Add(-time.Hour)), nil))
	refused("without the role", reason.OrderRole, deliver(instance.Sandboxd, box.Sign(door, practice.Third), nil))
	refused("changed", reason.OrderKey, deliver(instance.Sandboxd, wire.SignedOrder{Note: strings.Replace(good.Note, `"port":80`, `"port":81`, 1)}, nil))
	refused("a stop at sandboxd", reason.OrderInvalid, deliver(instance.Sandboxd, stop, nil))
	refused("a grant at killswitchd", reason.OrderInvalid, deliver(instance.Killswitchd, good, nil))
	if err := deliver(instance.Sandboxd, policy, nil); control.Status(err) != http.StatusBadRequest || !strings.Contains(err.Error(), "not the one that was signed") {
		t.Errorf("another card than the signed one: %v", err)
	}

	var g wire.Grant
	if err := deliver(instance.Sandboxd, good, &wire.OrderReply{Grant: &g}); err != nil || g.By != practice.Authority || g.Order == "" || g.Key == "" {
		t.Fatalf("%+v, %v", g, err)
	}
	if !reaches(box, kid.Name) {
		t.Error("not reached with a signed grant")
	}
	rec := box.WaitRecord("the grant", func(r *audit.Record) bool { return r.Event == audit.EventGrantPlaced && r.Fields["grant"] == g.ID })
	if s, err := list.Verify([]byte(rec.Fields["note"]), time.Now()); err != nil || s.ID != g.Order || s.Key != rec.Fields["key"] || s.Door != door.Door {
		t.Errorf("the record cannot be checked: %+v, %v", rec, err)
	}
	back := box.Sign(authority.Order{Action: authority.ActionUngrant, Kid: kid.Name, Grant: g.ID}, practice.Authority)
	if err := deliver(instance.Sandboxd, back, nil); err != nil {
		t.Fatal(err)
	}
	box.WaitRecord("the end of the grant", func(r *audit.Record) bool {
		return r.Event == audit.EventGrantEnded && r.Fields["grant"] == g.ID && r.Fields["order"] != "" && r.Fields["note"] != ""
	})
	refused("replayed", reason.OrderReplayed, deliver(instance.Sandboxd, good, nil))
	box.Kill9(instance.Sandboxd)
	box.WaitHealthy(instance.Sandboxd)
	refused("replayed after a restart", reason.OrderReplayed, deliver(instance.Sandboxd, good, nil))

	// Taking back is always right, as a stop is: root does it without a key, and the record says so.
	if err := deliver(instance.Sandboxd, box.Sign(door, practice.Authority), &wire.OrderReply{Grant: &g}); err != nil {
		t.Fatal(err)
	}
	q := url.Values{"by": {"root"}, "reason": {"odd"}}
	if err := box.Client(instance.Sandboxd).Call(t.Context(), http.MethodDelete, "/v1/kids/"+kid.Name+"/grants/"+g.ID+"?"+q.Encode(), nil, nil); err != nil {
		t.Fatal(err)
	}
	box.WaitRecord("the end without a signature", func(r *audit.Record) bool {
		return r.Event == audit.EventGrantEnded && r.Fields["grant"] == g.ID && r.Fields["unsigned"] == "uid:0" && r.Fields["note"] == ""
	})
}

// TestTheCommandsSignGrants: grant, ungrant and policy set with --key, and an order that was signed elsewhere.
func TestTheCommandsSignGrants(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(bareCard, nil)
	key := box.KeyFile(practice.Authority)
	what := []string{"grant", kid.Name, "files.vendor.test:80", "--for", "1h", "--reason", "docs"}
	if r := box.Tagout(append(what, "--by", practice.Authority)...); r.Code != 3 || !strings.Contains(r.Stderr, "--key") || !strings.Contains(r.Stderr, practice.Authority) {
		t.Errorf("without a key: %+v", r)
	}
	box.Must(append(what, "--key", key)...)
	if !reaches(box, kid.Name) {
		t.Error("not reached")
	}
	var grants []wire.Grant
	if err := box.Client(instance.Sandboxd).Call(t.Context(), http.MethodGet, "/v1/kids/"+kid.Name+"/grants", nil, &grants); err != nil || len(grants) != 1 {
		t.Fatalf("%+v, %v", grants, err)
	}
	box.Must("ungrant", kid.Name, grants[0].ID, "--key", key, "--reason", "done")
	if reaches(box, kid.Name) {
		t.Error("reached after it was taken back")
	}
	note := box.Must(append(what, "--key", key, "--print")...)
	if reaches(box, kid.Name) {
		t.Error("--print sent the order")
	}
	if r := box.TagoutIn(strings.NewReader(note), "order", "-"); r.Code != 0 || !reaches(box, kid.Name) {
		t.Errorf("an order that was signed elsewhere: %+v", r)
	}
	if r := box.TagoutIn(strings.NewReader(note), "order", "-"); r.Code != 3 || !strings.Contains(r.Stderr, "used before") {
		t.Errorf("a second time: %+v", r)
	}
}

// TestThePrintedCommandGrants: what a refusal and `policy explain` print opens the door, once its capitals are filled
// in. A name in place of the key is refused here: see TestTheCommandsSignGrants.
func TestThePrintedCommandGrants(t *testing.T) {
	t.Parallel()
	box := start(t)
	key := box.KeyFile(practice.Authority)
	refusal := "exec 3<>/dev/tcp/" + box.Inst.Gateway().String() + "/" + fmt.Sprint(instance.PortExplicit) +
		" || exit 1; printf 'GET http://files.vendor.test/hello.txt HTTP/1.1\\r\\nHost: files.vendor.test\\r\\nConnection: close\\r\\n\\r\\n' >&3; cat <&3"
	for from, said := range map[string]func(kid string) string{
		"a refusal": func(kid string) string { return box.Exec(kid, "/bin/bash", "-c", refusal).Stdout },
		"explain": func(kid string) string {
			return box.Tagout("policy", "explain", "--kid", kid, "files.vendor.test:80").Stdout
		},
	} {
		kid := box.Spawn(bareCard, nil)
		text := said(kid.Name)
		command := regexp.MustCompile(`tagout (grant [^"\n]*)`).FindStringSubmatch(text)
		if command == nil {
			t.Errorf("%s prints no command: %q", from, text)
			continue
		}
		box.Must(strings.Fields(strings.NewReplacer("FILE", key, "WHY", "docs").Replace(command[1]))...)
		if !reaches(box, kid.Name) {
			t.Errorf("%s: not reached after %q", from, command[1])
		}
	}
}
