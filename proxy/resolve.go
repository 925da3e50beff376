package proxy

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// Bounds of the DNS client.
const (
	dnsTry       = 1500 * time.Millisecond // for one resolver, one time
	dnsRounds    = 2                       // how often the list of resolvers is gone through
	maxAddresses = 16                      // of one answer
	maxDNSAnswer = 4096
)

// What a resolver says definitely.
var (
	errNoSuchName = errors.New("no such name")
	errNoAddress  = errors.New("the name has no IPv4 address")
)

// resolver asks the box's resolvers for A records, and for AAAA records where a name has no others: those are
// never dialled, but say why there is nothing to dial. It asks over sockets that carry the session's mark, so that the
// kernel drops the queries of a stopped session too. It reads no file of the host (/etc/hosts, resolv.conf).
type resolver struct {
	servers []netip.AddrPort
	mark    func(fd uintptr, mark uint32) error
}

// answer is the addresses of a name, in the order of the server's answer, and for how long they hold.
type answer struct {
	addrs []netip.Addr
	ttl   time.Duration
}

// lookup returns the addresses of name, a canonical name: IPv4 addresses, or where it has none its IPv6 ones.
func (r *resolver) lookup(ctx context.Context, mark uint32, name string) (answer, error) {
	if len(r.servers) == 0 {
		return answer{}, errors.New("the box's configuration names no resolvers")
	}
	fqdn, err := dnsmessage.NewName(name + ".")
	if err != nil {
		return answer{}, fmt.Errorf("asking for %s: %w", name, err)
	}
	said, err := r.lookupKind(ctx, mark, fqdn, dnsmessage.TypeA)
	if errors.Is(err, errNoAddress) {
		return r.lookupKind(ctx, mark, fqdn, dnsmessage.TypeAAAA)
	}
	return said, err
}

func (r *resolver) lookupKind(ctx context.Context, mark uint32, name dnsmessage.Name, kind dnsmessage.Type) (answer, error) {
	var errs []error
	for range dnsRounds {
		for _, server := range r.servers {
			said, err := r.ask(ctx, mark, server, name, kind)
			if err == nil || errors.Is(err, errNoSuchName) || errors.Is(err, errNoAddress) {
				return said, err
			}
			errs = append(errs, err)
			if ctx.Err() != nil {
				return answer{}, errors.Join(errs...)
			}
		}
	}
	return answer{}, errors.Join(errs...)
}

// ask asks one server, over UDP and, where the answer was cut, over TCP (RFC 1035, 4.2; RFC 7766).
func (r *resolver) ask(ctx context.Context, mark uint32, server netip.AddrPort, name dnsmessage.Name, kind dnsmessage.Type) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, dnsTry)
	defer cancel()
	query, id, err := newQuery(name, kind)
	if err != nil {
		return answer{}, err
	}
	said, cut, err := r.exchange(ctx, mark, "udp4", server, query, id, name, kind)
	if err == nil && cut {
		said, _, err = r.exchange(ctx, mark, "tcp4", server, query, id, name, kind)
	}
	if err != nil {
		return answer{}, fmt.Errorf("asking %s: %w", server, err)
	}
	return said, nil
}

func newQuery(name dnsmessage.Name, kind dnsmessage.Type) (query []byte, id uint16, err error) {
	var random [2]byte
	rand.Read(random[:]) // never fails
	id = binary.BigEndian.Uint16(random[:])
	b := dnsmessage.NewBuilder(nil, dnsmessage.Header{ID: id, RecursionDesired: true})
	err = errors.Join(
		b.StartQuestions(),
		b.Question(dnsmessage.Question{Name: name, Type: kind, Class: dnsmessage.ClassINET}),
		b.StartAdditionals(),
		b.OPTResource(edns0(), dnsmessage.OPTResource{}),
	)
	if err != nil {
		return nil, 0, fmt.Errorf("writing a query: %w", err)
	}
	query, err = b.Finish()
	return query, id, err
}

// edns0 announces how much fits into one UDP answer (RFC 6891).
func edns0() dnsmessage.ResourceHeader {
	var h dnsmessage.ResourceHeader
	h.SetEDNS0(1232, dnsmessage.RCodeSuccess, false) // the values are constants
	return h
}

var answerBufs = sync.Pool{New: func() any { return new([maxDNSAnswer]byte) }}

func (r *resolver) exchange(ctx context.Context, mark uint32, network string, server netip.AddrPort, query []byte, id uint16, name dnsmessage.Name, kind dnsmessage.Type) (said answer, cut bool, err error) {
	d := net.Dialer{Control: markControl(r.mark, mark)}
	conn, err := d.DialContext(ctx, network, server.String())
	if err != nil {
		return answer{}, false, err
	}
	defer conn.Close()                                                           // nothing is lost
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) }) // closed
	defer stop()
	stream := network == "tcp4"
	if stream {
		query = append(binary.BigEndian.AppendUint16(nil, uint16(len(query))), query...) // some 300 bytes
	}
	if _, err := conn.Write(query); err != nil {
		return answer{}, false, err
	}
	pooled := answerBufs.Get().(*[maxDNSAnswer]byte)
	defer answerBufs.Put(pooled)
	buf := pooled[:]
	for {
		n, err := readAnswer(conn, stream, buf)
		if err != nil {
			return answer{}, false, err
		}
		said, cut, matches, err := parseAnswer(buf[:n], id, name, kind)
		if stream && (!matches || cut) { // nobody else writes here, and there is nothing to fall back to
			return answer{}, false, errors.Join(errors.New("no whole answer to what was asked"), err)
		}
		if matches {
			return said, cut, err
		}
		// Somebody else's datagram: go on waiting for ours.
	}
}

func readAnswer(conn net.Conn, stream bool, buf []byte) (int, error) {
	if !stream {
		return conn.Read(buf)
	}
	var length [2]byte
	if _, err := io.ReadFull(conn, length[:]); err != nil {
		return 0, err
	}
	n := int(binary.BigEndian.Uint16(length[:]))
	if n > len(buf) {
		return 0, fmt.Errorf("an answer of %d bytes", n)
	}
	return io.ReadFull(conn, buf[:n])
}

// parseAnswer reads an answer. matches is false where it does not answer our question; the rest then means
// nothing.
func parseAnswer(msg []byte, id uint16, name dnsmessage.Name, kind dnsmessage.Type) (said answer, cut, matches bool, err error) {
	var p dnsmessage.Parser
	h, err := p.Start(msg)
	if err != nil || h.ID != id || !h.Response {
		return answer{}, false, false, err
	}
	qs, err := p.AllQuestions()
	if err != nil || len(qs) != 1 || qs[0].Type != kind || qs[0].Class != dnsmessage.ClassINET || lowerASCII(qs[0].Name.String()) != name.String() {
		return answer{}, false, false, errors.New("an answer to another question")
	}
	switch {
	case h.RCode == dnsmessage.RCodeNameError:
		return answer{}, false, true, errNoSuchName
	case h.RCode != dnsmessage.RCodeSuccess:
		return answer{}, false, true, fmt.Errorf("answered %v", h.RCode)
	case h.Truncated:
		return answer{}, true, true, nil
	}
	said, err = readAddrs(&p, name.String())
	return said, false, true, err
}

// readAddrs follows the chain of CNAMEs from name and returns the addresses at its end. They hold for as long as
// the shortest-lived record of the answer.
func readAddrs(p *dnsmessage.Parser, name string) (answer, error) {
	answers, err := p.AllAnswers()
	if err != nil {
		return answer{}, fmt.Errorf("reading the answer: %w", err)
	}
	alias := map[string]string{}
	at := map[string][]netip.Addr{}
	ttl := uint32(math.MaxUint32)
	for _, rr := range answers {
		if rr.Header.Class != dnsmessage.ClassINET {
			continue
		}
		ttl = min(ttl, rr.Header.TTL)
		owner := lowerASCII(rr.Header.Name.String())
		switch body := rr.Body.(type) {
		case *dnsmessage.CNAMEResource:
			alias[owner] = lowerASCII(body.CNAME.String())
		case *dnsmessage.AResource:
			at[owner] = append(at[owner], netip.AddrFrom4(body.A))
		case *dnsmessage.AAAAResource:
			at[owner] = append(at[owner], netip.AddrFrom16(body.AAAA))
		}
	}
	for range len(alias) {
		next, ok := alias[name]
		if !ok {
			break
		}
		name = next
	}
	addrs := at[name]
	if len(addrs) == 0 {
		return answer{}, errNoAddress
	}
	return answer{addrs[:min(len(addrs), maxAddresses)], time.Duration(ttl) * time.Second}, nil
}

// markControl marks a socket before it sends anything (net.Dialer.Control).
func markControl(set func(fd uintptr, mark uint32) error, mark uint32) func(string, string, syscall.RawConn) error {
	return func(_, _ string, rc syscall.RawConn) error {
		var markErr error
		err := rc.Control(func(fd uintptr) { markErr = set(fd, mark) })
		return errors.Join(err, markErr)
	}
}
