package main

import (
	"net/http"
	"path"
	"strings"

	"github.com/spf13/cobra"

	"tagout/internal/config"
	"tagout/sandboxd/image/keep"
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
			return a.addImage(cmd, f, refImageName(args[0]), keep.Wish{Way: "pull", Source: args[0]}, oci.Pulled{Ref: args[0], Transport: transport, Progress: a.progress()})
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
	return oci.NewTransport(box.Resolvers[0], box.UpstreamCAs, true)
}
