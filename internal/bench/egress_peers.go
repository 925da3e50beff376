package bench

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
)

// Names of the peers, as they stand in the table.
const (
	peerSplice      = "splice relay"
	peerGoproxy     = "bare goproxy"
	peerSmokescreen = "smokescreen"
	peerSquid       = "squid"
	peerTinyproxy   = "tinyproxy"
	peerBump        = "squid ssl-bump"
	peerDnsmasq     = "dnsmasq"
	peerCoredns     = "coredns"
)

// certgen makes squid's certificates; Debian has it in squid-openssl only.
const certgen = "/usr/lib/squid/security_file_certgen"

// peers are the programs beside which Tagout is measured. They live in a cgroup below the instance's, so that
// cleaning the instance up ends them too, and die with this process.
type peers struct {
	e       *egress
	dir     string // for their files
	cgroup  string // holds that of the programs and that of the clients, and nothing itself
	starts  *thread
	fd      *os.File // of the programs' cgroup
	clients string   // cgroup of their clients, with the same share of the processors as a kid's
	at      map[string]netip.AddrPort
	pid     map[string]int
}

// newPeers starts what is installed. A peer that is not there is left out, and the table says so.
func newPeers(ctx context.Context, e *egress) (p *peers, err error) {
	p = &peers{e: e, starts: newThread(), at: map[string]netip.AddrPort{}, pid: map[string]int{}}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("starting the peers: %w", err), p.close(context.WithoutCancel(ctx)))
		}
	}()
	p.dir = filepath.Join(e.Inst.RunDir(), "peers") // within the instance, so that a cleanup finds it
	if err := os.Mkdir(p.dir, 0o700); err != nil {
		return p, err
	}
	if err := os.Chmod(p.dir, 0o777); err != nil { // squid and tinyproxy give root up
		return p, err
	}
	if err := p.sweepShared(); err != nil {
		return p, err
	}
	rel := e.Inst.CgroupRel() + "/peers"
	p.cgroup = e.layout.V2(rel)
	if err := e.layout.Create(rel + "/programs"); err != nil {
		return p, err
	}
	if p.fd, err = os.Open(e.layout.V2(rel + "/programs")); err != nil {
		return p, err
	}
	if p.clients, err = e.clientGroup(rel + "/clients"); err != nil {
		return p, err
	}
	for i, peer := range p.list() {
		at := netip.AddrPortFrom(e.place.host, uint16(4001+i))
		if err := p.start(ctx, peer, at); err != nil {
			return p, fmt.Errorf("%s: %w", peer.name, err)
		}
	}
	return p, nil
}

// clientGroup makes the cgroup of the peers' clients and returns its directory in the hierarchy that has the cpu
// controller. It is below the instance's, as the kids' are: were clients not held alike, a busy machine would
// favour one of them.
func (e *egress) clientGroup(rel string) (dir string, err error) {
	if err := e.layout.Create(rel); err != nil {
		return "", err
	}
	v1 := e.layout.V1("cpu", rel)
	if v1 == "" {
		return e.layout.V2(rel), nil
	}
	return v1, os.MkdirAll(v1, 0o755)
}

// peer is how to start one.
type peer struct {
	name string
	prog string // looked for in the directory of peers, then in PATH
	udp  bool
	argv func(at netip.AddrPort) ([]string, error)
}

func (p *peers) list() []peer {
	server, practice := p.e.sink.at.String(), p.e.Internet
	resolver := netip.AddrPortFrom(practice.DNSAddr(), 53).String()
	return []peer{
		{peerSplice, "splice", false, func(at netip.AddrPort) ([]string, error) { return []string{at.String(), server}, nil }},
		{peerGoproxy, "goproxy", false, func(at netip.AddrPort) ([]string, error) { return []string{at.String()}, nil }},
		{peerSmokescreen, "smokescreen", false, func(at netip.AddrPort) ([]string, error) {
			return []string{"--listen-ip", at.Addr().String(), "--listen-port", fmt.Sprint(at.Port()),
				"--allow-range", p.e.Inst.PracticeNet().String(), "--resolver-address", resolver}, nil
		}},
		{peerTinyproxy, "tinyproxy", false, p.tinyproxy},
		{peerSquid, "squid", false, func(at netip.AddrPort) ([]string, error) { return p.squid("squid", at, "") }},
		{peerBump, "squid", false, p.bump},
		{peerDnsmasq, "dnsmasq", true, func(at netip.AddrPort) ([]string, error) {
			return []string{"--keep-in-foreground", "--conf-file=/dev/null", "--user=root", "--pid-file=" + filepath.Join(p.dir, "dnsmasq.pid"),
				"--listen-address=" + at.Addr().String(), "--bind-interfaces", fmt.Sprintf("--port=%d", at.Port()), "--no-resolv", "--no-hosts",
				"--host-record=" + nameBulk + "," + p.e.sink.at.Addr().String()}, nil
		}},
		{peerCoredns, "coredns", true, func(at netip.AddrPort) ([]string, error) {
			file, err := p.write("Corefile", fmt.Sprintf(".:%d {\n bind %s\n hosts {\n  %s %s\n  no_reverse\n }\n}\n", at.Port(), at.Addr(), p.e.sink.at.Addr(), nameBulk))
			return []string{"-conf", file}, err
		}},
	}
}

func (p *peers) tinyproxy(at netip.AddrPort) ([]string, error) {
	file, err := p.write("tinyproxy.conf", fmt.Sprintf("Listen %s\nPort %d\nMaxClients 20000\nTimeout 600\nLogLevel Connect\nLogFile %q\nDisableViaHeader Yes\n",
		at.Addr(), at.Port(), filepath.Join(p.dir, "tinyproxy.log")))
	return []string{"-d", "-c", file}, err
}

// squid writes a configuration in which squid only relays, or with bump reads what it relays.
func (p *peers) squid(name string, at netip.AddrPort, bump string) ([]string, error) {
	conf := fmt.Sprintf(`http_port %[1]s %[2]s
http_access allow all
cache deny all
cache_mem 8 MB
access_log stdio:%[3]s/%[4]s-access.log
cache_log %[3]s/%[4]s.log
pid_filename none
coredump_dir none
dns_nameservers %[5]s
shutdown_lifetime 0 seconds
max_filedescriptors 16384
`, at, bump, p.dir, name, p.e.Internet.DNSAddr())
	if bump != "" {
		conf += fmt.Sprintf("sslcrtd_program %s -s %s/certs -M 4MB\nsslcrtd_children 2 startup=1\nacl first at_step SslBump1\nssl_bump peek first\nssl_bump bump all\ntls_outgoing_options cafile=%s\n",
			certgen, p.dir, p.e.Internet.CAFile())
	}
	file, err := p.write(name+".conf", conf)
	return []string{"-N", "-n", p.e.Inst.Name() + name, "-f", file}, err
}

// sweepShared removes what squids with names of ours left in shared memory: they leave it when they are killed.
func (p *peers) sweepShared() error {
	var errs []error
	for _, name := range []string{"squid", "bump"} {
		files, err := filepath.Glob("/dev/shm/" + p.e.Inst.Name() + name + "-*.shm")
		errs = append(errs, err)
		for _, f := range files {
			errs = append(errs, os.Remove(f))
		}
	}
	return errors.Join(errs...)
}

func (p *peers) bump(at netip.AddrPort) ([]string, error) {
	if err := writeCA(p.caFile(), filepath.Join(p.dir, "bump.pem")); err != nil {
		return nil, err
	}
	if out, err := exec.Command(certgen, "-c", "-s", filepath.Join(p.dir, "certs"), "-M", "4MB").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	if out, err := exec.Command("chmod", "-R", "a+rwX", filepath.Join(p.dir, "certs")).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	return p.squid("bump", at, "ssl-bump cert="+filepath.Join(p.dir, "bump.pem")+" generate-host-certificates=on dynamic_cert_mem_cache_size=4MB")
}

// caFile is the certificate of the CA that squid signs with.
func (p *peers) caFile() string { return filepath.Join(p.dir, "bump-ca.pem") }

// writeCA makes a CA: its certificate alone in one file, and with its key in the other.
func writeCA(certFile, bothFile string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "squid of the benchmark"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw})
	both := append(cert[:len(cert):len(cert)], pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})...)
	return errors.Join(os.WriteFile(certFile, cert, 0o644), os.WriteFile(bothFile, both, 0o644)) // squid is not root; the CA signs for this run only
}

func (p *peers) write(name, text string) (string, error) {
	file := filepath.Join(p.dir, name)
	return file, os.WriteFile(file, []byte(text), 0o644)
}

// find returns the path of a peer's program, "" where it is not installed.
func (p *peers) find(pr peer) string {
	if file := filepath.Join(p.e.Peers, pr.prog); isFile(file) {
		return file
	}
	if pr.name == peerBump && !isFile(certgen) {
		return ""
	}
	for _, dir := range strings.Split(os.Getenv("PATH")+":/usr/sbin:/usr/local/sbin", ":") {
		if file := filepath.Join(dir, pr.prog); dir != "" && isFile(file) {
			return file
		}
	}
	return ""
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// start starts the peer and waits until it answers.
func (p *peers) start(ctx context.Context, pr peer, at netip.AddrPort) error {
	prog := p.find(pr)
	if prog == "" {
		fmt.Fprintf(p.e.Out, "%s is not installed: `make bench-egress` installs it\n", pr.name)
		return nil
	}
	argv, err := pr.argv(at)
	if err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(p.dir, strings.ReplaceAll(pr.name, " ", "-")+".out"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(prog, argv...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = p.dir, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL, UseCgroupFD: true, CgroupFD: int(p.fd.Fd())}
	if err := p.starts.do(cmd.Start); err != nil {
		return err
	}
	dead := make(chan error, 1)
	go func() { dead <- cmd.Wait() }()
	if err := p.ready(ctx, pr, at, dead); err != nil {
		said, _ := os.ReadFile(log.Name())
		return fmt.Errorf("%w: %s", err, said)
	}
	p.at[pr.name], p.pid[pr.name] = at, cmd.Process.Pid
	return nil
}

// ready waits until the peer listens. A name server has bound its UDP port by the time that its TCP port answers.
func (p *peers) ready(ctx context.Context, pr peer, at netip.AddrPort, dead chan error) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	for {
		c, err := net.DialTimeout("tcp4", at.String(), time.Second)
		if err == nil {
			return c.Close()
		}
		select {
		case err := <-dead:
			dead <- err
			return fmt.Errorf("ended early: %w", err)
		case <-ctx.Done():
			return fmt.Errorf("does not listen on %s: %w", at, ctx.Err())
		case <-time.After(20 * time.Millisecond): // between looks at a condition
		}
	}
}

// of returns how to find the peer's process.
func (p *peers) of(name string) func() ([]int, error) {
	return func() ([]int, error) { return []int{p.pid[name]}, nil }
}

func (p *peers) close(ctx context.Context) error {
	var errs []error
	if p.cgroup != "" {
		errs = append(errs, cgroup.Kill(p.cgroup))
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		errs = append(errs, cgroup.WaitEmpty(ctx, p.cgroup), p.e.layout.Remove(ctx, p.e.Inst.CgroupRel()+"/peers"))
	}
	if p.fd != nil {
		errs = append(errs, p.fd.Close())
	}
	p.starts.close()
	errs = append(errs, p.sweepShared())
	if p.dir != "" {
		errs = append(errs, os.RemoveAll(p.dir))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("ending the peers: %w", err)
	}
	return nil
}
