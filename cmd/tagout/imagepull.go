package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"os"
	"path"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/config"
	"tagout/sandboxd/image/oci"
)

func (a *app) imagePullCommand() *cobra.Command {
	var f addFlags
	cmd := &cobra.Command{
		Use:   "pull REF",
		Short: "Fetch an image from a registry and unpack it",
		Long: `Fetch an image from a registry, over TLS, and unpack it. REF is such as
registry.example.com/tools/shell:1.2 or registry.example.com/tools/shell@sha256:…;
the second is the same image for ever. The box's own resolvers and certificate
authorities are used, and credentials that ` + "`docker login`" + ` left. Each layer is compared with
its digest; a pull that is interrupted leaves nothing.`,
		Args: wants("REF"),
		RunE: func(cmd *cobra.Command, args []string) error {
			transport, err := a.registryTransport()
			if err != nil {
				return err
			}
			defer transport.CloseIdleConnections()
			return a.addImage(cmd, f, refImageName(args[0]), oci.Pulled{Ref: args[0], Transport: transport, Progress: a.progress()})
		},
	}
	f.add(cmd)
	return cmd
}

// refImageName makes a name for an image out of its reference: the last part of the repository, with the tag.
func refImageName(ref string) string {
	ref, _, _ = strings.Cut(ref, "@")
	repo, tag, _ := strings.Cut(path.Base(ref), ":")
	if tag != "" && tag != "latest" {
		repo += "-" + tag
	}
	return strings.ToLower(repo)
}

// registryTransport reaches registries as the box's proxy reaches the world: by its resolvers, trusting its authorities.
func (a *app) registryTransport() (*http.Transport, error) {
	if err := needRoot("reading the box's configuration"); err != nil {
		return nil, err
	}
	inst, err := a.open()
	if err != nil {
		return nil, err
	}
	box, err := config.Load(inst.BoxConfig())
	if err != nil {
		return nil, err
	}
	roots, err := x509.SystemCertPool()
	if err != nil {
		return nil, fmt.Errorf("reading the system's certificate authorities: %w", err)
	}
	for _, file := range box.UpstreamCAs {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("reading the box's certificate authorities: %w", err)
		}
		if !roots.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s holds no PEM certificate", file)
		}
	}
	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, box.Resolvers[0].String())
	}}
	dialer := &net.Dialer{Timeout: 10 * time.Second, Resolver: resolver}
	return &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: dialer.DialContext, ForceAttemptHTTP2: true, TLSHandshakeTimeout: 10 * time.Second,
		ResponseHeaderTimeout: 30 * time.Second, TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
	}, nil
}
