package suggest

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/card"
	"tagout/internal/policy"
	"tagout/internal/reason"
)

const head = "apiVersion: tagout/v1\nkind: Card\nname: tidy\ntask: Tidy up.\nimage: host\n"
const tail = "stop: {authority: Ada, maxTime: 1s}\n"

const blockCard = head + `egress:
  allow: # only these
    - host: api.vendor.test
      ports: [443]
      protocol: tls
      inspect: true
      methods: [GET]
      paths: ["/v1/*"] # everything below

    # The files.
    - {host: files.vendor.test, ports: [80], protocol: http, expires: 1h}
  # Always wins.
  deny:
    - host: "**.bad.test"
` + tail

var spawned = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)

func lookup(name string, code reason.Code) audit.Record {
	return audit.Record{Event: audit.EventLookup, Outcome: audit.OutcomeDeny, Reason: code, Dst: &audit.Dst{Name: name, Proto: "udp"}}
}

func opened(name string, port uint16, code reason.Code) audit.Record {
	return audit.Record{Event: audit.EventConnOpened, Outcome: audit.OutcomeDeny, Reason: code, Dst: &audit.Dst{Name: name, Port: port}}
}

func request(name string, port uint16, proto, method, path string, code reason.Code) audit.Record {
	return audit.Record{Event: audit.EventRequest, Outcome: audit.OutcomeDeny, Reason: code, Dst: &audit.Dst{Name: name, Port: port, Proto: proto},
		Fields: map[string]string{"method": method, "path": path}}
}

func hook(addr string, port uint16, code reason.Code) audit.Record {
	return audit.Record{Event: audit.EventConnectDenied, Outcome: audit.OutcomeDeny, Reason: code, Dst: &audit.Dst{Addr: netip.MustParseAddr(addr), Port: port, Proto: "tcp"}}
}

func given(name, addr string) audit.Record {
	return audit.Record{Event: audit.EventLookup, Outcome: audit.OutcomeAllow, Dst: &audit.Dst{Name: name, Addr: netip.MustParseAddr(addr)}}
}

func suggest(t *testing.T, text string, records ...audit.Record) Result {
	t.Helper()
	r, err := Suggest(Input{File: "card.yaml", Card: []byte(text), Spawned: spawned, Now: spawned.Add(time.Minute), Records: records})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestAdditions: each kind of refusal, and the rule that would have avoided it.
func TestAdditions(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		what    string
		records []audit.Record
		want    []string // rendered rules
	}{
		{"a lookup", []audit.Record{lookup("New.Test.", reason.NameNotAllowed), lookup("new.test", reason.NameNotAllowed)},
			[]string{"host: new.test ports: [443] protocol: tls"}},
		{"a lookup and where it went", []audit.Record{lookup("new.test", reason.NameNotAllowed), opened("new.test", 8443, reason.NameNotAllowed)},
			[]string{"host: new.test ports: [8443] protocol: tls"}},
		{"CONNECT", []audit.Record{opened("new.test", 443, reason.NameNotAllowed)}, []string{"host: new.test ports: [443] protocol: tls"}},
		{"plain HTTP through the proxy", []audit.Record{request("new.test", 80, "", "GET", "http://new.test/a?b", reason.NameNotAllowed)},
			[]string{`host: new.test ports: [80] protocol: http methods: [GET] paths: ["/a"]`}},
		{"another port", []audit.Record{given("api.vendor.test", "198.18.0.16"), hook("198.18.0.16", 8443, reason.PortNotAllowed)},
			[]string{"host: api.vendor.test ports: [8443] protocol: tls"}},
		{"another method", []audit.Record{request("api.vendor.test", 443, "tls", "POST", "/v1/jobs", reason.MethodDenied)},
			[]string{`host: api.vendor.test ports: [443] protocol: tls inspect: true methods: [POST] paths: ["/v1/jobs"]`}},
		{"methods on one path", []audit.Record{request("api.vendor.test", 443, "tls", "PUT", "/v1/x", reason.MethodDenied), request("api.vendor.test", 443, "tls", "DELETE", "/v1/x", reason.MethodDenied)},
			[]string{`host: api.vendor.test ports: [443] protocol: tls inspect: true methods: [DELETE, PUT] paths: ["/v1/x"]`}},
		{"another path", []audit.Record{request("api.vendor.test", 443, "tls", "GET", "/v2/%61", reason.PathDenied), request("api.vendor.test", 443, "tls", "POST", "/v2/b", reason.MethodDenied)},
			[]string{`host: api.vendor.test ports: [443] protocol: tls inspect: true methods: [GET] paths: ["/v2/a"]`, `host: api.vendor.test ports: [443] protocol: tls inspect: true methods: [POST] paths: ["/v2/b"]`}},
		{"a name that no pattern reaches", []audit.Record{lookup("mine.s3.amazonaws.com", reason.PublicSuffix)},
			[]string{"host: mine.s3.amazonaws.com ports: [443] protocol: tls"}},
		{"allowed by now", []audit.Record{lookup("api.vendor.test", reason.NameNotAllowed), request("api.vendor.test", 443, "tls", "GET", "/v1/x", reason.PathDenied)}, nil},
		{"allowed all along", []audit.Record{given("api.vendor.test", "198.18.0.16")}, nil},
	} {
		r := suggest(t, blockCard, c.records...)
		var got []string
		for _, a := range r.Added {
			got = append(got, strings.Join(strings.Fields(strings.TrimPrefix(strings.Join(card.RenderAllow(a.Rule, card.Expiry{}), " "), "- ")), " "))
		}
		if fmt.Sprint(got) != fmt.Sprint(c.want) || len(r.Skipped) > 0 || (r.Diff == "") != (c.want == nil) {
			t.Errorf("%s: %q, skipped %v; want %q\n%s", c.what, got, r.Skipped, c.want, r.Diff)
		}
	}
}

// TestNeverSuggested: what no diff contains, and why.
func TestNeverSuggested(t *testing.T) {
	t.Parallel()
	exfil := make([]audit.Record, 0, 10)
	for i := range 10 {
		exfil = append(exfil, lookup(fmt.Sprintf("chunk%d.evil.test", i), reason.NameNotAllowed))
	}
	for what, c := range map[string]struct {
		records []audit.Record
		why     string
	}{
		"metadata address":     {[]audit.Record{hook("169.254.169.254", 80, reason.Metadata)}, "metadata addresses can never"},
		"metadata by proxy":    {[]audit.Record{opened("169.254.169.254", 80, reason.NameNotAllowed)}, "addresses are never"},
		"metadata name":        {[]audit.Record{lookup("metadata.google.internal", reason.NameNotAllowed)}, "metadata services"},
		"raw address":          {[]audit.Record{hook("203.0.113.7", 443, reason.RawAddress)}, "use a host name"},
		"unknown virtual":      {[]audit.Record{hook("198.18.0.99", 443, reason.PortNotAllowed)}, "no name was looked up"},
		"private answer":       {[]audit.Record{opened("api.vendor.test", 443, reason.PrivateAnswer)}, "for a person to say"},
		"deny rule":            {[]audit.Record{lookup("a.bad.test", reason.DenyRule)}, "a deny rule always wins"},
		"deny rule since":      {[]audit.Record{lookup("a.bad.test", reason.NameNotAllowed)}, "deny rule in line 19"},
		"single label":         {[]audit.Record{lookup("kubernetes", reason.NameNotAllowed)}, "local network"},
		"local name":           {[]audit.Record{lookup("db.corp.internal", reason.NameNotAllowed)}, "local network"},
		"reverse lookup":       {[]audit.Record{lookup("1.0.0.10.in-addr.arpa", reason.NameNotAllowed)}, "local network"},
		"DNS elsewhere":        {[]audit.Record{hook("8.8.8.8", 53, reason.DNSBypass)}, "no rule of a card"},
		"DoT by name":          {[]audit.Record{opened("dns.test", 853, reason.NameNotAllowed)}, "name servers"},
		"QUIC":                 {[]audit.Record{hook("198.18.0.16", 443, reason.QUIC)}, "no rule of a card"},
		"data by name":         {exfil, "10 names under evil.test"},
		"one long label":       {[]audit.Record{lookup("mfrggzdfmztwq2lknnwg23tpobyxe43uov3ho6dzpi.evil.test", reason.NameNotAllowed)}, "unusually long"},
		"no name":              {[]audit.Record{lookup("evil\x00.test", reason.NameInvalid)}, "no rule of a card"},
		"hostile name":         {[]audit.Record{lookup("x\n+    - host: evil.test", reason.NameNotAllowed)}, "not a host name"},
		"TRACE":                {[]audit.Record{request("api.vendor.test", 443, "tls", "TRACE", "/v1/x", reason.MethodDenied)}, "can never be allowed"},
		"dot segments":         {[]audit.Record{request("api.vendor.test", 443, "tls", "GET", "/v1/../x", reason.PathDenied)}, "cannot be written"},
		"star in the path":     {[]audit.Record{request("api.vendor.test", 443, "tls", "GET", "/v2/*", reason.PathDenied)}, "a star"},
		"blank in the path":    {[]audit.Record{request("api.vendor.test", 443, "tls", "GET", "/v2/a%20b", reason.PathDenied)}, "a blank"},
		"bidirectional path":   {[]audit.Record{request("api.vendor.test", 443, "tls", "GET", "/v2/%E2%80%AE", reason.PathDenied)}, "cannot be shown"},
		"cut path":             {[]audit.Record{request("api.vendor.test", 443, "tls", "GET", "/v2/aaa…", reason.PathDenied)}, "too long for the record"},
		"expired":              {[]audit.Record{opened("files.vendor.test", 80, reason.Expired)}, "has run out"},
		"a limit":              {[]audit.Record{opened("files.vendor.test", 80, reason.ByteLimit)}, "raise it in the rule"},
		"wrong protocol":       {[]audit.Record{request("files.vendor.test", 80, "tls", "GET", "/", reason.PathDenied)}, "wants it otherwise"},
		"stopped":              {[]audit.Record{hook("198.18.0.16", 443, reason.Stopped)}, "no rule of a card"},
		"other name in hello":  {[]audit.Record{opened("api.vendor.test", 443, reason.SNIMismatch)}, "no rule of a card"},
		"request, odd":         {[]audit.Record{request("api.vendor.test", 443, "tls", "GET", "/v1%2fx", reason.AmbiguousHTTP)}, "no rule of a card"},
		"nothing to go by":     {[]audit.Record{{Event: audit.EventConnectDenied, Outcome: audit.OutcomeDeny, Reason: reason.RawSocket}}, "no rule of a card"},
		"a name and a request": {[]audit.Record{opened("8.8.8.8", 443, reason.RawAddress)}, "use a host name"},
	} {
		r := suggest(t, blockCard, c.records...)
		if len(r.Added) > 0 || r.Diff != "" || len(r.Skipped) == 0 || !strings.Contains(r.Skipped[0].Why, c.why) {
			t.Errorf("%s: added %v, skipped %v, want %q", what, r.Added, r.Skipped, c.why)
		}
		for _, s := range r.Skipped {
			if strings.ContainsAny(s.What+s.Why, "\n\r\x00") || s.Count == 0 {
				t.Errorf("%s: %+v", what, s)
			}
		}
	}
	// With fewer names under one domain each of them is worth asking about.
	if r := suggest(t, blockCard, exfil[:maxSiblings]...); len(r.Added) != maxSiblings {
		t.Errorf("%d names: %+v", maxSiblings, r)
	}
}

// TestDiffApplies: patch accepts the diff, whatever way the card is written in, and the card that comes out
// allows what was refused and nothing else that was not.
func TestDiffApplies(t *testing.T) {
	t.Parallel()
	records := []audit.Record{
		request("api.vendor.test", 443, "tls", "POST", "/v1/jobs", reason.MethodDenied), opened("new.test", 443, reason.NameNotAllowed),
		request("plain.test", 80, "", "GET", "http://plain.test/a", reason.NameNotAllowed), lookup("a.bad.test", reason.DenyRule),
	}
	api := "{host: api.vendor.test, ports: [443], protocol: tls, inspect: true, methods: [GET], paths: [\"/v1/*\"]}"
	for what, text := range map[string]string{
		"block":                 blockCard,
		"block at the end":      head + tail + "egress:\n  allow:\n  - " + api,
		"entries not indented":  head + "egress:\n  deny:\n  - {host: x.test}\n  allow:\n  - " + api + "\n" + tail,
		"flow":                  head + "egress: {allow: [" + api + "], deny: [{host: x.test}]}\n" + tail,
		"flow on several lines": head + "egress:\n  {\n    allow: [" + api + "] }\n" + tail,
		"flow list":             head + "egress:\n  allow: [" + api + "]\n" + tail,
		"carriage returns":      strings.ReplaceAll(blockCard, "\n", "\r\n"),
		"comments behind":       head + tail + "egress:\n  allow:\n    - " + api + "\n# the end\n",
	} {
		r := suggest(t, text, records...)
		if len(r.Added) != 3 {
			t.Errorf("%s: %+v", what, r)
			continue
		}
		next := apply(t, text, r.Diff)
		c, err := card.ParseAt("card.yaml", []byte(next), spawned)
		if err != nil {
			t.Errorf("%s: %v\n%s", what, err, next)
			continue
		}
		for ask, want := range map[string]bool{
			"POST https://api.vendor.test/v1/jobs": true, "GET https://api.vendor.test/v1/x": true, "new.test:443": true, "GET http://plain.test/a": true,
			"POST https://api.vendor.test/v1/x": false, "new.test:80": false, "POST http://plain.test/a": false, "x.new.test:443": false, "a.bad.test:443": false,
		} {
			q, err := policy.ParseQuestion(strings.Fields(ask)...)
			if err != nil {
				t.Fatal(err)
			}
			if e, err := policy.Explain(c.EgressAt(spawned, time.Hour), int64(time.Hour), q); err != nil || e.Allowed != want {
				t.Errorf("%s: %s: %+v, %v", what, ask, e, err)
			}
		}
		if again := suggest(t, next, records...); len(again.Added) > 0 {
			t.Errorf("%s: suggested again: %+v", what, again.Added)
		}
	}
	// Without any egress section, and with an empty one.
	for _, text := range []string{head + tail, head + "egress: {}\n" + tail, head + tail + "egress: {allow: []}"} {
		r := suggest(t, text, records[1])
		if next := apply(t, text, r.Diff); !strings.Contains(next, "- host: new.test # refused once: name-not-allowed\n") {
			t.Errorf("%s became %s", text, next)
		}
	}
	// What is there is not touched where it need not be: comments stay.
	if diff := suggest(t, blockCard, records...).Diff; strings.Contains(diff, "\n-") {
		t.Errorf("the diff removes lines:\n%s", diff)
	}
}

// apply gives the diff to git apply, which reads what patch(1) does.
func apply(t *testing.T, text, diff string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "card.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	git := exec.CommandContext(t.Context(), "git", "apply", "-p0", "--whitespace=nowarn", "--directory=", "-")
	git.Dir, git.Stdin = filepath.Dir(file), strings.NewReader(diff)
	git.Env = append(os.Environ(), "GIT_CEILING_DIRECTORIES="+filepath.Dir(filepath.Dir(file)))
	if out, err := git.CombinedOutput(); err != nil {
		t.Fatalf("git apply: %v: %s\n%s", err, out, diff)
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(got)
}

func TestCardThatCannotBeExtended(t *testing.T) {
	t.Parallel()
	text := `{apiVersion: tagout/v1, kind: Card, name: tidy, task: Tidy up., image: host, stop: {authority: Ada, maxTime: 1s}}`
	r, err := Suggest(Input{File: "card.yaml", Card: []byte(text), Spawned: spawned, Now: spawned, Records: []audit.Record{opened("new.test", 443, reason.NameNotAllowed)}})
	if err == nil || !strings.Contains(err.Error(), "by hand") || len(r.Added) != 1 {
		t.Errorf("%+v, %v", r, err)
	}
}

func FuzzSuggest(f *testing.F) {
	f.Add("new.test", uint16(443), "", "GET", "/a", uint8(reason.NameNotAllowed), "egress:\n  allow:\n    - {host: a.test, ports: [1], protocol: tcp}\n")
	f.Add("a.test", uint16(80), "http", "POST", "/\u202e\"# x", uint8(reason.MethodDenied), "egress: {allow: [{host: a.test, ports: [80], protocol: http, methods: [GET]}]}\n")
	f.Add("x: y # z", uint16(0), "tls", "", "", uint8(reason.NameNotAllowed), "egress:\n  allow:\n  - host: \"*.a.test\"\n    ports: [80]\n    protocol: http\n    paths: [/]\n")
	f.Fuzz(func(t *testing.T, name string, port uint16, proto, method, path string, code uint8, egress string) {
		text := head + egress + tail
		in := Input{File: "card.yaml", Card: []byte(text), Spawned: spawned, Now: spawned, Records: []audit.Record{
			lookup(name, reason.Code(code)), opened(name, port, reason.Code(code)), request(name, port, proto, method, path, reason.Code(code)),
		}}
		r, err := Suggest(in)
		if err != nil {
			return
		}
		for _, s := range r.Skipped {
			if strings.ContainsFunc(s.What+s.Why, func(r rune) bool { return r < 0x20 || r == 0x7f }) {
				t.Fatalf("%+v", s)
			}
		}
		if (r.Diff == "") != (len(r.Added) == 0) {
			t.Fatalf("%+v", r)
		}
		for line := range strings.Lines(r.Diff) {
			if !strings.ContainsAny(line[:1], " +-@\\") {
				t.Fatalf("line %q of\n%s", line, r.Diff)
			}
		}
	})
}
