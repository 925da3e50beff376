package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"tagout/internal/instance"
	"tagout/internal/leaks"
	"tagout/internal/wire"
)

// maxSecret bounds a secret's value.
const maxSecret = 64 << 10

const valueHelp = `Its value is read from standard input or from --file, never from the command
line, where every user of the machine could see it; one line end at its end is left off.`

func (a *app) vaultSetCommand() *cobra.Command {
	var e wire.VaultEntry
	var hosts []string
	var ports []uint
	var as, file string
	cmd := &cobra.Command{
		Use:     "set NAME --host HOST:PORT [--lease PROVIDER/ROLE]",
		Aliases: []string{"put"},
		Short:   "Put the secret that standard input holds into the vault, for what is named only",
		Long: `Put a secret into the vault. ` + valueHelp + `

--as says where in a request the secret stands; its token must stand there too:
  header:NAME  bearer  basic  basic:USER  query:NAME  cookie:NAME
  sigv4:ACCESSKEYID   signs the request as AWS wants it
  body:FIELD          a field of a JSON or form body, dotted for a deeper one
Left out, it is the value of any header field.

With --lease no value is read: each session that is granted the secret gets a lease of
its own from a provider of the box's configuration, which is revoked when it ends. With
it write sigv4 alone: the access key's id comes with the lease.`,
		Args: secretName,
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if e.Hosts, err = withPorts(hosts, ports); err != nil {
				return usage(err)
			}
			if len(e.Hosts) == 0 && !e.Canary {
				return usage(errors.New("--host is needed: a secret is bound to the hosts that it is for, as name:port"))
			}
			e.Present = readAs(as)
			if e.Lease == "" {
				if e.Value, err = a.readSecret(file); err != nil {
					return usage(err)
				}
			} else if file != "" {
				return usage(errors.New("--lease and --file exclude each other: a leased secret has no value of its own"))
			}
			var info wire.VaultInfo
			if err := a.call(cmd, instance.Credd, http.MethodPut, secretRoute(args[0]), e, &info); err != nil {
				return err
			}
			return a.showSecret(info, "is in the vault")
		},
	}
	cmd.Flags().StringSliceVar(&hosts, "host", nil, "host:port that the secret is for; may be given again")
	cmd.Flags().UintSliceVar(&ports, "port", nil, "port of the hosts that are given without one; may be given again")
	cmd.Flags().StringVar(&as, "as", "", "how it is presented (see above)")
	cmd.Flags().StringSliceVar(&e.Methods, "method", nil, "only in requests with this method; may be given again")
	cmd.Flags().StringArrayVar(&e.Paths, "path", nil, "only in requests for this path, such as /v1/*; may be given again")
	cmd.Flags().StringVar(&file, "file", "", "read the value from this file (default: standard input)")
	cmd.Flags().StringVar(&e.Lease, "lease", "", "PROVIDER/ROLE that each session leases it from, instead of a value")
	cmd.Flags().BoolVar(&e.Canary, "canary", false, "a honeytoken: nobody has a reason to use it, so a trip rule on canaries stops whoever does")
	return cmd
}

func (a *app) vaultRotateCommand() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "rotate NAME",
		Short: "Replace a secret's value and keep what it is bound to; living tokens stand for the new value from their next use",
		Long:  "Replace a secret's value and keep all else. " + valueHelp,
		Args:  secretName,
		RunE: func(cmd *cobra.Command, args []string) error {
			value, err := a.readSecret(file)
			if err != nil {
				return usage(err)
			}
			var info wire.VaultInfo
			if err := a.call(cmd, instance.Credd, http.MethodPost, secretRoute(args[0])+"/rotate", wire.RotateRequest{Value: value}, &info); err != nil {
				return err
			}
			return a.showSecret(info, "has a new value")
		},
	}
	cmd.Flags().StringVar(&file, "file", "", "read the value from this file (default: standard input)")
	return cmd
}

func (a *app) showSecret(i wire.VaultInfo, what string) error {
	switch {
	case a.json:
		return a.printJSON(i)
	case i.Canary:
		a.printf("secret %s %s as a canary (version %d): every use is refused, and trips the rules on it\n", i.Name, what, i.Version)
	case i.Lease != "":
		a.printf("secret %s %s (version %d): each session leases its own from %s, for %s as %s\n", i.Name, what, i.Version, i.Lease, strings.Join(i.Hosts, ", "), asText(i.Present))
	default:
		a.printf("secret %s %s (version %d), for %s as %s\n", i.Name, what, i.Version, strings.Join(i.Hosts, ", "), asText(i.Present))
	}
	return nil
}

// secretName takes one argument, a secret's name. Nothing of what came is repeated: it may be a value.
func secretName(cmd *cobra.Command, args []string) error {
	if err := wants("NAME")(cmd, args); err != nil {
		return fmt.Errorf("%w; a value is read from standard input or --file, and one that was written here has been seen by others", err)
	}
	d, err := leaks.New()
	if err != nil {
		return err
	}
	if found := d.Find(args[0]); len(found) > 0 {
		return fmt.Errorf("NAME looks like a secret's value (%s): it was on the command line, where others have seen it: replace it where it was issued", found[0].Rule)
	}
	return nil
}

// withPorts gives each host that has no port each of the ports.
func withPorts(hosts []string, ports []uint) ([]string, error) {
	var out []string
	used := false
	for _, h := range hosts {
		if strings.Contains(h, ":") {
			out = append(out, h)
			continue
		}
		if len(ports) == 0 {
			return nil, errors.New("--host without a port: write it as host:port, or add --port")
		}
		used = true
		for _, p := range ports {
			out = append(out, net.JoinHostPort(h, strconv.FormatUint(uint64(p), 10)))
		}
	}
	if len(ports) > 0 && !used {
		return nil, errors.New("--port is for hosts that are given without a port, and there is none")
	}
	return out, nil
}

// readAs reads what --as says; credd checks it.
func readAs(text string) wire.Presentation {
	as, rest, _ := strings.Cut(text, ":")
	p := wire.Presentation{As: as}
	switch as {
	case wire.AsBasic, wire.AsSigV4:
		p.User = rest
	default:
		p.Name = rest
	}
	return p
}

// asText is what readAs reads.
func asText(p wire.Presentation) string {
	switch {
	case p.As == "":
		return "any header field"
	case p.Name+p.User != "":
		return p.As + ":" + p.Name + p.User
	}
	return p.As
}

// readSecret reads a value, from standard input where file is empty. A terminal is refused: what is typed there would be
// shown.
func (a *app) readSecret(file string) (string, error) {
	if file == "" {
		file = "-"
	}
	if file == "-" && a.terminal().in != nil {
		return "", errors.New("the secret's value is read from standard input, which is a terminal: use --file, or `tagout vault set NAME --host HOST:PORT < FILE`")
	}
	raw, err := a.readInput(file, maxSecret+1)
	if err != nil {
		var path *os.PathError
		if errors.As(err, &path) {
			err = path.Err // the file's name may be the value
		}
		return "", fmt.Errorf("reading the secret's value: %w", err)
	}
	raw = bytes.TrimSuffix(bytes.TrimSuffix(raw, []byte("\n")), []byte("\r"))
	defer clear(raw)
	switch {
	case len(raw) == 0:
		return "", errors.New("the secret's value is empty: pipe it into this command, or name its file with --file")
	case len(raw) > maxSecret:
		return "", fmt.Errorf("the secret's value is longer than %d bytes", maxSecret)
	}
	return string(raw), nil
}
