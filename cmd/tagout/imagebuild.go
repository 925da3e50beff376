package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/wire"
	"tagout/internal/yamlx"
	"tagout/sandboxd/api"
	"tagout/sandboxd/image/build"
	"tagout/sandboxd/image/store"
	"tagout/sandboxd/image/unpack"
)

func (a *app) imageBuildCommand() *cobra.Command {
	var r wire.BuildRequest
	var keyring, space string
	limits := unpack.DefaultLimits()
	cmd := &cobra.Command{
		Use:   "build NAME --suite SUITE",
		Short: "Build an image of Debian packages",
		Long: `Build an image of Debian's essential packages, apt and those that --package names,
with what they depend on. sandboxd must be running.

Nothing that comes from a mirror is run on this machine: a kid that reaches the
mirrors alone has apt check and lay out the packages, and another one, without any
network, installs them. What a build that fails or is killed had made is removed. The
versions of all packages stand in the image's manifest (` + "`tagout image ls --json`" + `), and doctor
tells when the mirrors have other ones. This needs the Debian package mmdebstrap.`,
		Example: `  tagout image build tools --suite bookworm --package git,python3 \
    --source "http://deb.debian.org/debian-security bookworm-security main"`,
		Args: wants("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := needRoot("building an image"); err != nil {
				return err
			}
			r.Name, r.MaxBytes, r.MaxFiles = args[0], limits.Bytes, limits.Files
			var ok bool
			if r.Space, ok = yamlx.ParseSize(space); !ok {
				return usage(errors.New("--space: write a whole number with KiB, MiB or GiB behind it, such as 4GiB"))
			}
			if keyring != "" {
				var err error
				if r.Keyring, err = os.ReadFile(keyring); err != nil {
					return usage(fmt.Errorf("reading the keyring: %w", err))
				}
			}
			return a.buildImage(cmd, r)
		},
	}
	cmd.Flags().StringVar(&r.Suite, "suite", "", "Debian's name of the release, such as bookworm")
	cmd.Flags().StringSliceVar(&r.Packages, "package", nil, "a package, or several with commas between them: NAME, or NAME=VERSION")
	cmd.Flags().StringVar(&r.Mirror, "mirror", build.DefaultMirror, "where the suite is")
	cmd.Flags().StringSliceVar(&r.Components, "component", []string{"main"}, "component of the mirror's suite")
	cmd.Flags().StringArrayVar(&r.Sources, "source", nil, `a further source, as "URL SUITE COMPONENT…"`)
	cmd.Flags().StringVar(&keyring, "keyring", "", "file with the keys that sources are signed with (default: Debian's, "+build.DefaultKeyring+")")
	cmd.Flags().StringVar(&space, "space", "4GiB", "memory in which the files are laid out")
	cmd.Flags().DurationVar(&r.Timeout, "timeout", build.DefaultTime, "most time that it may take")
	cmd.Flags().Int64Var(&limits.Bytes, "max-bytes", limits.Bytes, "most bytes that the image's files may have")
	cmd.Flags().IntVar(&limits.Files, "max-files", limits.Files, "most files that the image may have")
	cmd.MarkFlagRequired("suite") // it is there
	return cmd
}

// buildImage asks sandboxd for it and tells what is being done.
func (a *app) buildImage(cmd *cobra.Command, r wire.BuildRequest) error {
	var built *store.Manifest
	err := a.stream(cmd.Context(), instance.Sandboxd, "/v1/images/build", r, func(raw json.RawMessage) error {
		var f api.ImageFrame
		if err := json.Unmarshal(raw, &f); err != nil {
			return err
		}
		switch {
		case f.Problem != nil:
			return &control.Error{Problem: *f.Problem}
		case f.Image != nil:
			built = f.Image
		case !a.json:
			fmt.Fprintln(a.err, f.Progress) // nobody is left to be told
		}
		return nil
	})
	if err == nil && built == nil {
		err = errors.New("sandboxd ended before the image was built: start it and build again")
	}
	if err != nil {
		return err
	}
	return a.printImage(*built)
}
