package proxy

import (
	"bytes"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"tagout/internal/policy"
	"tagout/internal/reason"
)

func packed(m *dnsmessage.Message) []byte {
	raw, err := m.Pack()
	if err != nil {
		panic(err) // made by these tests
	}
	return raw
}

// TestResolverThatLies: whatever a resolver answers that is no answer to the question, nothing is dialled, and the
// refusal has its reason and record in the time that the resolvers have.
func TestResolverThatLies(t *testing.T) {
	edge := dnsmessage.MustNewName("edge.cdn.test.")
	class := func(c dnsmessage.Class) dnsmessage.ResourceHeader {
		return dnsmessage.ResourceHeader{Name: edge, Class: c}
	}
	for name, lie := range map[string]func(m *dnsmessage.Message, stream bool) []byte{
		"another id":            func(m *dnsmessage.Message, _ bool) []byte { m.ID++; return packed(m) },
		"no answer but a query": func(m *dnsmessage.Message, _ bool) []byte { m.Response = false; return packed(m) },
		"another question":      func(m *dnsmessage.Message, _ bool) []byte { m.Questions[0].Name = edge; return packed(m) },
		"another type":          func(m *dnsmessage.Message, _ bool) []byte { m.Questions[0].Type = dnsmessage.TypeMX; return packed(m) },
		"another class": func(m *dnsmessage.Message, _ bool) []byte {
			m.Questions[0].Class = dnsmessage.ClassCHAOS
			return packed(m)
		},
		"no question": func(m *dnsmessage.Message, _ bool) []byte { m.Questions = nil; return packed(m) },
		"two questions": func(m *dnsmessage.Message, _ bool) []byte {
			m.Questions = append(m.Questions, m.Questions[0])
			return packed(m)
		},
		"NXDOMAIN with an address": func(m *dnsmessage.Message, _ bool) []byte { m.RCode = dnsmessage.RCodeNameError; return packed(m) },
		"an error with an address": func(m *dnsmessage.Message, _ bool) []byte { m.RCode = dnsmessage.RCodeServerFailure; return packed(m) },
		"silence":                  func(*dnsmessage.Message, bool) []byte { return nil },
		"scrap":                    func(*dnsmessage.Message, bool) []byte { return bytes.Repeat([]byte{0xc0}, 600) },
		"cut off":                  func(m *dnsmessage.Message, _ bool) []byte { raw := packed(m); return raw[:len(raw)-3] },
		"truncated, over TCP too":  func(m *dnsmessage.Message, _ bool) []byte { m.Truncated = true; return packed(m) },
		"another id over TCP": func(m *dnsmessage.Message, stream bool) []byte {
			if m.Truncated = !stream; stream {
				m.ID++
			}
			return packed(m)
		},
		"huge over TCP": func(m *dnsmessage.Message, stream bool) []byte {
			if m.Truncated = !stream; stream {
				return append(packed(m), make([]byte, 60_000)...)
			}
			return packed(m)
		},
		"an address of another class": func(m *dnsmessage.Message, _ bool) []byte {
			m.Answers[len(m.Answers)-1].Header = class(dnsmessage.ClassCHAOS)
			return packed(m)
		},
		"an address of another name": func(m *dnsmessage.Message, _ bool) []byte {
			m.Answers[len(m.Answers)-1].Header.Name = dnsmessage.MustNewName("else.test.")
			return packed(m)
		},
		"aliases in a circle": func(m *dnsmessage.Message, _ bool) []byte {
			m.Answers = append(m.Answers[:1], dnsmessage.Resource{Header: class(dnsmessage.ClassINET), Body: &dnsmessage.CNAMEResource{CNAME: m.Questions[0].Name}})
			return packed(m)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			at := listen(t, serverAddr, 0, echo)
			w.allow(rule(apiHost, at.Port(), policy.TCP))
			w.dns.twist.Store(&lie)
			began := time.Now()
			c := w.dialName(apiHost, at.Port())
			c.Write([]byte{0})
			wantReset(t, c)
			w.wantRefused(reason.ResolveFailed)
			if took := time.Since(began); took > patience {
				t.Errorf("refused after %v", took)
			}
		})
	}
}

// FuzzAnswer: no answer of a resolver panics or gives more addresses than are used; one that does not match gives none.
func FuzzAnswer(f *testing.F) {
	name := dnsmessage.MustNewName("api.vendor.test.")
	q := dnsmessage.Question{Name: name, Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}
	head := dnsmessage.ResourceHeader{Name: name, Class: dnsmessage.ClassINET, TTL: 5}
	for _, m := range []dnsmessage.Message{
		{Header: dnsmessage.Header{ID: 7, Response: true}, Questions: []dnsmessage.Question{q}, Answers: []dnsmessage.Resource{{Header: head, Body: &dnsmessage.AResource{A: [4]byte{192, 0, 2, 1}}}}},
		{Header: dnsmessage.Header{ID: 7, Response: true}, Questions: []dnsmessage.Question{q}, Answers: []dnsmessage.Resource{{Header: head, Body: &dnsmessage.CNAMEResource{CNAME: name}}}},
		{Header: dnsmessage.Header{ID: 7, Response: true, Truncated: true}, Questions: []dnsmessage.Question{q}},
		{Header: dnsmessage.Header{ID: 7, Response: true, RCode: dnsmessage.RCodeNameError}, Questions: []dnsmessage.Question{q}},
	} {
		f.Add(packed(&m))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		for _, kind := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypeAAAA} {
			said, cut, matches, err := parseAnswer(raw, 7, name, kind)
			if len(said.addrs) > maxAddresses || said.ttl < 0 {
				t.Fatalf("%x gives %+v", raw, said)
			}
			if (!matches || cut || err != nil) && len(said.addrs) > 0 {
				t.Fatalf("%x gives addresses: matches %v, cut %v, %v", raw, matches, cut, err)
			}
			if matches && !cut && err == nil && len(said.addrs) == 0 {
				t.Fatalf("%x gives neither addresses nor an error", raw)
			}
		}
	})
}
