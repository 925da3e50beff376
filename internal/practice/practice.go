// Package practice is a small internet for demos, drills and tests: a network namespace of its own, joined to
// the host by one veth pair, in which real servers listen on addresses of 203.0.113.0/24 (RFC 5737).
//
//	host end      .1  the box's side of the link
//	ns            .2  DNS server for *.test, counts every query
//	api           .3  HTTPS vendor API, certificate from the practice CA
//	files         .4  plain HTTP file server
//	ticks         .5  TCP sink on port 7000 for numbered ticks and bulk data
//	alerts        .6  HTTP webhook on port 8080 that keeps alert lines
//	evil          .7  the attacker's sink: listens, never answers
//	svc.own       .8  HTTPS service of the user's own; asks credd about every token it is shown
//	registry      .9  HTTP and HTTPS shelf for what ordinary clients fetch; mirror and git are it too
//	books.own     .10 HTTPS service of the user's own; checks the JWTs that credd mints, with package tokencheck
//	llm           .12 HTTPS API of a language model, as OpenAI's clients speak it
//
// The servers run in the calling process; only their sockets live in the namespace. Everything that arrives is
// noted with CLOCK_MONOTONIC timestamps, so that the caller can be an outside observer of a stop. A timestamp
// is taken after the bytes were read, so it is never earlier than the arrival.
//
// The package promises that no packet of it leaves the machine and that Cleanup finds everything by name. It
// does not promise to resemble the real internet in speed or loss.
package practice

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/config"
	"tagout/internal/instance"
)

// Host names that the practice DNS server knows.
const (
	NameAPI    = "api.vendor.test"
	NameFiles  = "files.vendor.test"
	NameTicks  = "ticks.vendor.test"
	NameAlerts = "alerts.vendor.test"
	NameEvil   = "evil.test"
	NameOwn    = "svc.own.test"
	NameBooks  = "books.own.test"
	NameModel  = "llm.vendor.test"
	// NameRebind and NameLoopback resolve to addresses that nobody may be led to (SSRF).
	NameRebind   = "rebind.vendor.test"
	NameLoopback = "loopback.vendor.test"
)

// Ports.
const (
	PortTicks   = 7000
	PortWebhook = 8080
	PortOther   = 8443 // on the API's address: an allowed name's port that no card allows
)

// Options say what to build.
type Options struct {
	// Instance gives the addresses, the link's name and the directory. It must be valid.
	Instance instance.Instance
	// CreddSocket is the unix socket that the user's own services ask about tokens. Where it is empty or nobody listens,
	// every token is refused.
	CreddSocket string
	// Secret is the only credential that api.vendor.test accepts. Empty: one is made up; see Internet.Secret.
	Secret string
}

// Internet is a running practice internet. Its observers are safe for concurrent use.
type Internet struct {
	// The observers. Never nil after Start.
	DNS      *DNS
	API      *API
	Files    *Files
	Sink     *Sink
	Webhook  *Webhook
	Attacker *Attacker
	Own      *Own
	Books    *Books
	Model    *Model
	Shelf    *Shelf

	inst    instance.Instance
	secret  string
	people  []config.Authority // who gives orders on its box, with public keys
	private map[string]string  // name -> private key
	ns      *namespace
	ca      *authority
	undo    []func() error // teardown, run backwards
}

// Now is CLOCK_MONOTONIC, the clock of every timestamp in this package.
func Now() time.Duration {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // this clock always exists
	return time.Duration(ts.Nano())
}

// Start builds the practice internet of the instance and starts its servers. What a dead predecessor left is
// removed first. On an error nothing is left. The caller owns the result and must Close it. Needs root.
func Start(ctx context.Context, o Options) (*Internet, error) {
	if err := Cleanup(o.Instance); err != nil {
		return nil, fmt.Errorf("starting the practice internet: %w", err)
	}
	n := &Internet{inst: o.Instance, secret: o.Secret}
	if n.secret == "" {
		n.secret = randomSecret()
	}
	steps := []struct {
		name string
		run  func() error
	}{
		{"making its directory", n.makeDir},
		{"making its certificate authority", n.makeCA},
		{"making its people's keys", n.makeKeys},
		{"making its network namespace", n.makeNetNS},
		{"joining it to the host", n.join},
		{"starting the DNS server", n.startDNS},
		{"starting the vendor API", n.startAPI},
		{"starting the file server", n.startFiles},
		{"starting the sink", n.startSink},
		{"starting the alert webhook", n.startWebhook},
		{"starting the attacker's sink", n.startAttacker},
		{"starting the user's own service", func() error { return n.startOwn(o.CreddSocket) }},
		{"starting the language model", n.startModel},
		{"starting the user's library", func() error { return n.startBooks(o.CreddSocket) }},
		{"starting the shelf", n.startShelf},
	}
	for _, s := range steps {
		err := ctx.Err()
		if err == nil {
			err = s.run()
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("starting the practice internet: %s: %w", s.name, err), n.Close())
		}
	}
	return n, nil
}

// Close stops the servers and removes the namespace, the link and the directory. Closing twice is fine.
func (n *Internet) Close() error {
	var errs []error
	for i := len(n.undo) - 1; i >= 0; i-- {
		errs = append(errs, n.undo[i]())
	}
	n.undo = nil
	return errors.Join(errs...)
}

// Secret is the credential that the vendor API accepts: the value to put into the vault, never into a kid.
func (n *Internet) Secret() string { return n.secret }

// Link is the name of the host's end of the link to the practice internet.
func (n *Internet) Link() string { return linkName(n.inst) }

// Addresses of the servers, all in the instance's practice /28.
func (n *Internet) HostAddr() netip.Addr    { return addr(n.inst, 1) }
func (n *Internet) DNSAddr() netip.Addr     { return addr(n.inst, 2) }
func (n *Internet) APIAddr() netip.Addr     { return addr(n.inst, 3) }
func (n *Internet) FilesAddr() netip.Addr   { return addr(n.inst, 4) }
func (n *Internet) TicksAddr() netip.Addr   { return addr(n.inst, 5) }
func (n *Internet) WebhookAddr() netip.Addr { return addr(n.inst, 6) }
func (n *Internet) EvilAddr() netip.Addr    { return addr(n.inst, 7) }
func (n *Internet) OwnAddr() netip.Addr     { return addr(n.inst, 8) }
func (n *Internet) BooksAddr() netip.Addr   { return addr(n.inst, 10) }
func (n *Internet) ModelAddr() netip.Addr   { return addr(n.inst, 12) }

// EvilAddr6 is the attacker's IPv6 address, out of 2001:db8::/32 (RFC 3849); 2001:db8::7 in slot 0.
func (n *Internet) EvilAddr6() netip.Addr { return addr6(n.inst, 7) }

func addr(inst instance.Instance, host byte) netip.Addr {
	a := inst.PracticeNet().Addr().As4()
	a[3] += host
	return netip.AddrFrom4(a)
}

func addr6(inst instance.Instance, host byte) netip.Addr {
	a := [16]byte{0: 0x20, 1: 0x01, 2: 0x0d, 3: 0xb8, 7: byte(inst.Slot()), 15: host}
	return netip.AddrFrom16(a)
}

// dir is the practice internet's own directory.
func dir(inst instance.Instance) string { return filepath.Join(inst.RunDir(), "practice") }

func netnsPath(inst instance.Instance) string { return filepath.Join(dir(inst), "netns") }

// linkName is the host-side end of the veth pair. It must not begin like a kid's link or equal an end of the
// gateway's.
func linkName(inst instance.Instance) string { return fmt.Sprintf("tgi%x", inst.Slot()) }

func (n *Internet) makeDir() error {
	// The run directory may belong to the box's set-up: it is made where it is missing and never changed.
	if err := os.MkdirAll(dir(n.inst), 0o755); err != nil { // daemons read the CA certificate here
		return fmt.Errorf("making %s: %w", dir(n.inst), err)
	}
	n.undo = append(n.undo, func() error { return os.RemoveAll(dir(n.inst)) })
	return nil
}

func randomSecret() string {
	raw := make([]byte, 20)
	rand.Read(raw) // crypto/rand never fails (it ends the program instead)
	return "vk_live_" + hex.EncodeToString(raw)
}
