package build

import (
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// ErrRequest is wrapped where a request cannot be carried out as it is.
var ErrRequest = errors.New("this cannot be built")

// Request says what to build. The zero value of every field but Suite stands for its default.
type Request struct {
	Suite      string   // such as "bookworm"
	Mirror     string   // default DefaultMirror
	Components []string // of the mirror's suite; default main
	More       []string // further sources: "URL SUITE COMPONENT…"
	Packages   []string // beside the essential ones and apt
	Keyring    []byte   // what sources are signed with (gpgv(1)); default: the machine's keys of Debian's archive
	Space      int64    // bytes of memory in which the files are laid out
	Time       time.Duration
}

// Defaults and bounds.
const (
	DefaultMirror  = "http://deb.debian.org/debian"
	DefaultKeyring = "/usr/share/keyrings/debian-archive-keyring.gpg" // package debian-archive-keyring
	DefaultSpace   = 4 << 30
	DefaultTime    = time.Hour

	minSpace    = 16 << 20
	maxSpace    = 32 << 30
	maxTime     = 24 * time.Hour
	maxPackages = 512
	maxSources  = 8
	maxKeyring  = 1 << 20
)

var (
	suiteRE     = regexp.MustCompile(`^[a-z][a-z0-9.-]{0,63}$`)
	componentRE = regexp.MustCompile(`^[a-z][a-z0-9.-]{0,31}$`)
	pathRE      = regexp.MustCompile(`^(/[A-Za-z0-9.+~_-]+)*/?$`)
	hostRE      = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,252})$`)
	// A name that ends in a minus sign would tell apt to remove the package (apt-get(8)).
	packageRE = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]{0,126}[a-z0-9+.](:[a-z0-9][a-z0-9-]*[a-z0-9])?(=[A-Za-z0-9.+:~-]{1,127})?$`)
)

// Source is one archive, in one of its suites.
type Source struct {
	URL        string   `json:"url"`
	Suite      string   `json:"suite"`
	Components []string `json:"components"`
}

// line is the source in the form of sources.list(5).
func (s Source) line() string {
	return "deb " + s.URL + " " + s.Suite + " " + strings.Join(s.Components, " ")
}

func (s Source) check() error {
	u, err := url.Parse(s.URL)
	port := 0
	if err == nil && u.Port() != "" {
		port, err = strconv.Atoi(u.Port())
	}
	switch {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.User != nil || u.RawQuery != "" || u.Fragment != "" ||
		!hostRE.MatchString(u.Hostname()) || !pathRE.MatchString(u.EscapedPath()) || strings.Contains(u.Path+"/", "/../") || port < 0 || port > 65535:
		return fmt.Errorf("%w: source %q: write an http or https address, such as %s", ErrRequest, s.URL, DefaultMirror)
	case !suiteRE.MatchString(s.Suite):
		return fmt.Errorf("%w: suite %q: write its name, such as bookworm", ErrRequest, s.Suite)
	case len(s.Components) == 0:
		return fmt.Errorf("%w: source %s: name its components, such as main", ErrRequest, s.URL)
	}
	for _, c := range s.Components {
		if !componentRE.MatchString(c) {
			return fmt.Errorf("%w: component %q: write its name, such as main", ErrRequest, c)
		}
	}
	return nil
}

// complete puts in defaults and checks everything: what passes is used in command lines and in a card.
func (r Request) complete() (Request, []Source, error) {
	if r.Mirror == "" {
		r.Mirror = DefaultMirror
	}
	if len(r.Components) == 0 {
		r.Components = []string{"main"}
	}
	if r.Space == 0 {
		r.Space = DefaultSpace
	}
	if r.Time == 0 {
		r.Time = DefaultTime
	}
	sources := []Source{{URL: strings.TrimSuffix(r.Mirror, "/"), Suite: r.Suite, Components: r.Components}}
	for _, more := range r.More {
		f := strings.Fields(more)
		if len(f) < 3 {
			return r, nil, fmt.Errorf("%w: source %q: write URL SUITE COMPONENT…", ErrRequest, more)
		}
		sources = append(sources, Source{URL: strings.TrimSuffix(f[0], "/"), Suite: f[1], Components: f[2:]})
	}
	for _, s := range sources {
		if err := s.check(); err != nil {
			return r, nil, err
		}
	}
	switch {
	case len(sources) > maxSources:
		return r, nil, fmt.Errorf("%w: there are more than %d sources", ErrRequest, maxSources)
	case len(r.Packages) > maxPackages:
		return r, nil, fmt.Errorf("%w: more than %d packages are named", ErrRequest, maxPackages)
	case r.Space < minSpace || r.Space > maxSpace:
		return r, nil, fmt.Errorf("%w: give it a space from %d to %d MiB", ErrRequest, minSpace>>20, maxSpace>>20)
	case r.Time < time.Second || r.Time > maxTime:
		return r, nil, fmt.Errorf("%w: give it a time from 1s to %s", ErrRequest, maxTime)
	case len(r.Keyring) > maxKeyring:
		return r, nil, fmt.Errorf("%w: its keyring is longer than %d bytes", ErrRequest, maxKeyring)
	}
	for _, p := range r.Packages {
		if !packageRE.MatchString(p) {
			return r, nil, fmt.Errorf("%w: package %q: write its name, or NAME=VERSION", ErrRequest, p)
		}
	}
	return r, sources, nil
}

// endpoints returns the hosts that a card must allow, each with its ports, by protocol.
func endpoints(sources []Source) []endpoint {
	var out []endpoint
	for _, s := range sources {
		u, _ := url.Parse(s.URL) // it was checked
		e := endpoint{host: u.Hostname(), protocol: "http", port: 80}
		if u.Scheme == "https" {
			e.protocol, e.port = "tls", 443
		}
		if p, err := strconv.Atoi(u.Port()); err == nil {
			e.port = p
		}
		if !slices.Contains(out, e) {
			out = append(out, e)
		}
	}
	return out
}

type endpoint struct {
	host, protocol string
	port           int
}

// memory is what a build's kid may use beside its files.
const memory = 1 << 30

// cardFor is the job card of a build's kid. It reaches the sources, nil: nothing.
func cardFor(task string, r Request, sources []Source) string {
	var b strings.Builder
	fmt.Fprintf(&b, "apiVersion: tagout/v1\nkind: Card\nname: image-build\ntask: %s\nimage: host+writable\n", task)
	if len(sources) == 0 {
		b.WriteString("network: none\n")
	} else {
		b.WriteString("egress:\n  allow:\n")
		for _, e := range endpoints(sources) {
			fmt.Fprintf(&b, "    - {host: %q, ports: [%d], protocol: %s", e.host, e.port, e.protocol)
			if e.protocol == "http" {
				b.WriteString(", methods: [GET, HEAD]")
			}
			b.WriteString("}\n")
		}
	}
	const kib = 1 << 10
	fmt.Fprintf(&b, "filesystem: {root: %dKiB, workspace: 16MiB, tmp: 64MiB}\n", (r.Space+kib-1)/kib)
	fmt.Fprintf(&b, "limits: {pids: 512, memory: %dKiB, cpus: %d, openFiles: 4096, lifetime: %s, idle: %s}\n", (r.Space+memory)/kib, runtime.NumCPU(), r.Time+time.Minute, r.Time+time.Minute)
	b.WriteString("stop: {authority: \"Tagout's builder of images\", maxTime: 60s}\n")
	return b.String()
}
