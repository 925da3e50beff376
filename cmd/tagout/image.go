package main

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/card"
	"tagout/sandboxd/image/keep"
	"tagout/sandboxd/image/oci"
	"tagout/sandboxd/image/store"
	"tagout/sandboxd/image/unpack"
)

func (a *app) imageCommand() *cobra.Command {
	cmd := group("image", "Fetch, import, build, list and remove the images that kids can run on")
	cmd.AddCommand(a.imageImportCommand(), a.imagePullCommand(), a.imageBuildCommand(), a.imageListCommand(), a.imageRemoveCommand(), a.imageSweepCommand())
	return cmd
}

// images opens the instance's store. Nobody but root reaches it.
func (a *app) images() (*store.Store, error) {
	if err := needRoot("reaching the image store"); err != nil {
		return nil, err
	}
	inst, err := a.open()
	if err != nil {
		return nil, err
	}
	return store.Open(inst.ImageDir(), filepath.Dir(inst.KidDir("x")))
}

// keeper is the store with records of what this command does to it.
func (a *app) keeper() (*keep.Keeper, error) {
	s, err := a.images()
	if err != nil {
		return nil, err
	}
	inst, err := a.open()
	if err != nil {
		return nil, err
	}
	return &keep.Keeper{Store: s, Audit: &ownLog{inst: inst, err: a.err}}, nil
}

// addFlags are what all ways to an image have in common.
type addFlags struct {
	name   string
	limits unpack.Limits
}

func (f *addFlags) add(cmd *cobra.Command) {
	most := unpack.DefaultLimits()
	f.limits = most
	cmd.Flags().StringVar(&f.name, "name", "", "what cards call it (default: made from the source's name)")
	cmd.Flags().Int64Var(&f.limits.Bytes, "max-bytes", most.Bytes, "most bytes that its files may have, those of all layers together")
	cmd.Flags().IntVar(&f.limits.Files, "max-files", most.Files, "most files that its layers may have")
}

// addImage unpacks src, which w describes, into the store and says what came of it.
func (a *app) addImage(cmd *cobra.Command, f addFlags, fallback string, w keep.Wish, src store.Source) error {
	if f.limits.Bytes < 1 || f.limits.Files < 1 {
		return usage(errors.New("--max-bytes and --max-files: give numbers from 1 on"))
	}
	if f.name == "" {
		f.name = fallback
	}
	if !card.NamesImage(f.name) {
		return usage(fmt.Errorf("%q cannot name an image: give one with --name: up to 63 lower-case letters, digits, dots, dashes and underscores, a letter first", f.name))
	}
	k, err := a.keeper()
	if err != nil {
		return err
	}
	w.Name, w.Actor, w.Limits = f.name, actor(), f.limits
	m, err := k.Add(cmd.Context(), w, src)
	if err != nil {
		return err
	}
	return a.printImage(m)
}

func (a *app) printImage(m store.Manifest) error {
	if a.json {
		return a.printJSON(m)
	}
	a.printf("image %s: %s, %s, %s\n", m.Name, m.Digest, count(m.Files, "file"), size(m.Size))
	for _, why := range slices.Sorted(maps.Keys(m.Skipped)) {
		a.printf("left out %s: %s\n", count(m.Skipped[why], "file"), why)
	}
	return nil
}

// progress tells people what is being done; with --json nobody reads it.
func (a *app) progress() oci.Progress {
	if a.json {
		return nil
	}
	return func(format string, args ...any) { fmt.Fprintf(a.err, format+"\n", args...) } // nobody is left to be told
}

func (a *app) imageImportCommand() *cobra.Command {
	var f addFlags
	cmd := &cobra.Command{
		Use:   "import FILE",
		Short: "Unpack an image: an OCI layout, what `docker save` wrote, or an archive of a root filesystem",
		Long: `Unpack an image, once; every kid whose card names it shares it, read-only.

FILE is a directory or tar archive with an OCI image layout, what ` + "`docker save`" + ` or
` + "`podman save`" + ` wrote, or a tar archive (plain, gzip, zstd) of a root filesystem.
Digests are checked where the format has them. Devices, FIFOs, set-uid bits and
extended attributes are left out. An image that had the name is replaced; kids that
run keep the one with which they were made.`,
		Args: wants("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			src, err := oci.File(args[0], a.progress())
			if err != nil {
				return usage(err)
			}
			return a.addImage(cmd, f, fileImageName(args[0]), keep.Wish{Way: "import", Source: args[0]}, src)
		},
	}
	f.add(cmd)
	return cmd
}

var archiveSuffix = regexp.MustCompile(`(\.oci|\.docker)?\.(tar(\.gz|\.zst)?|tgz)$`)

// fileImageName makes a name for an image out of its file's.
func fileImageName(file string) string {
	return strings.ToLower(archiveSuffix.ReplaceAllString(filepath.Base(filepath.Clean(file)), ""))
}

func (a *app) imageListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the images", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			s, err := a.images()
			if err != nil {
				return err
			}
			images, err := s.List()
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(images)
			}
			w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "IMAGE\tDIGEST\tSIZE\tAGE\tUSED BY\tSOURCE")
			for _, i := range images {
				name := i.Name
				switch {
				case i.Broken != "":
					fmt.Fprintf(w, "(unreadable)\t\t\t\t\t%s\n", i.Broken)
					continue
				case !i.Current:
					name += " (replaced)"
				}
				fmt.Fprintf(w, "%s\t%.19s\t%s\t%s\t%s\t%s\n", name, i.Digest, size(i.Size), time.Since(i.Created).Round(time.Second), strings.Join(i.UsedBy, ","), i.Source)
			}
			return w.Flush()
		},
	}
}

func (a *app) imageRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME", Short: "Remove an image that no kid uses", Args: wants("NAME"),
		RunE: func(_ *cobra.Command, args []string) error {
			k, err := a.keeper()
			if err != nil {
				return err
			}
			err = k.Remove(args[0], actor())
			switch {
			case errors.Is(err, store.ErrInUse):
				return &coded{exitRefused, err}
			case errors.Is(err, store.ErrUnknown):
				return usage(err)
			case err != nil:
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"name": args[0], "removed": true})
			}
			a.printf("image %s is gone\n", args[0])
			return nil
		},
	}
}

func (a *app) imageSweepCommand() *cobra.Command {
	return &cobra.Command{
		Use: "gc", Short: "Remove images that were replaced and that no kid uses, and what killed imports left", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			k, err := a.keeper()
			if err != nil {
				return err
			}
			swept, err := k.Sweep(actor())
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(swept)
			}
			a.printf("removed %s and %s\n", count(len(swept.Images), "image"), count(swept.Leftovers, "leftover"))
			return nil
		},
	}
}

// size is a number of bytes, for people.
func size(n int64) string {
	if n < 1<<20 {
		return fmt.Sprintf("%d KiB", (n+1023)>>10)
	}
	return fmt.Sprintf("%d MiB", n>>20)
}
