package main

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// kidPath splits KID:PATH.
func kidPath(arg string) (kid, where string, err error) {
	kid, where, ok := strings.Cut(arg, ":")
	if !ok || kid == "" || !path.IsAbs(where) {
		return "", "", usage(fmt.Errorf("%q: write KID:PATH, with an absolute path below /workspace or /tmp", arg))
	}
	return kid, where, nil
}

func filesRoute(kid, where string, more ...string) string {
	q := url.Values{"path": {where}}
	for i := 0; i+1 < len(more); i += 2 {
		q.Set(more[i], more[i+1])
	}
	return "/v1/kids/" + url.PathEscape(kid) + "/files?" + q.Encode()
}

// carry sends body, which may be nil, to sandboxd; the caller closes the answer's body.
func (a *app) carry(ctx context.Context, method, route string, body io.Reader) (*http.Response, error) {
	inst, err := a.open()
	if err != nil {
		return nil, err
	}
	c := control.NewClient(inst.Socket(instance.Sandboxd))
	resp, err := c.Do(ctx, method, route, body, "application/octet-stream")
	return resp, unanswered(inst, instance.Sandboxd, err)
}

func (a *app) putCommand() *cobra.Command {
	return &cobra.Command{
		Use: "put FILE|DIRECTORY|- KID:PATH", Short: "Copy a file, or a directory with all files in it, into a kid",
		Long: `Copy a file to PATH in a kid, or the files of a directory below PATH, which is made. PATH
is below /workspace or /tmp. A file is there whole or not at all. Only files and
directories are copied: a link on the way, in the kid or in the directory, is refused.`,
		Args: wants("FILE", "KID:PATH"),
		RunE: func(cmd *cobra.Command, args []string) error {
			kid, where, err := kidPath(args[1])
			if err != nil {
				return err
			}
			done, err := a.put(cmd.Context(), args[0], kid, where)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(done)
			}
			a.printf("%s, %s\n", count(done.Files, "file"), count(int(done.Bytes), "byte"))
			return nil
		},
	}
}

func (a *app) put(ctx context.Context, from, kid, where string) (done wire.Carried, err error) {
	route, body := filesRoute(kid, where), a.in
	if from != "-" {
		f, err := os.Open(from)
		if err != nil {
			return done, usage(err)
		}
		defer f.Close() // only read
		info, err := f.Stat()
		switch {
		case err != nil:
			return done, err
		case info.IsDir():
			r, w := io.Pipe()
			defer r.Close() // ends packing
			go func() { w.CloseWithError(packDir(w, from)) }()
			route, body = filesRoute(kid, where, "archive", "tar"), r
		case !info.Mode().IsRegular():
			return done, usage(fmt.Errorf("%s is neither a file nor a directory", from))
		default:
			route, body = filesRoute(kid, where, "mode", fmt.Sprintf("%o", info.Mode().Perm())), f
		}
	}
	resp, err := a.carry(ctx, http.MethodPut, route, body)
	if err != nil {
		return done, err
	}
	defer resp.Body.Close() // read whole
	return done, json.NewDecoder(resp.Body).Decode(&done)
}

// packDir writes the files below dir as a tar stream.
func packDir(w io.Writer, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close() // only read
	out := tar.NewWriter(w)
	err = fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || name == "." {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if d.IsDir() {
			return out.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: int64(info.Mode().Perm())})
		}
		if !info.Mode().IsRegular() {
			return fmt.Errorf("%s is neither a file nor a directory: leave it out", filepath.Join(dir, name))
		}
		return packFile(out, root, name)
	})
	return errors.Join(err, out.Close())
}

func packFile(out *tar.Writer, root *os.Root, name string) error {
	f, err := root.Open(name)
	if err != nil {
		return err
	}
	defer f.Close() // only read
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: info.Size(), Mode: int64(info.Mode().Perm()), ModTime: info.ModTime()}); err != nil {
		return err
	}
	_, err = io.CopyN(out, f, info.Size())
	return err
}

func (a *app) getCommand() *cobra.Command {
	var dir, skip bool
	cmd := &cobra.Command{
		Use: "get KID:PATH FILE|DIRECTORY|-", Short: "Copy a file, or with --dir a directory, out of a kid",
		Long: `Copy a file out of a kid, or with --dir the files of a directory. PATH is below /workspace
or /tmp. What is copied to must not exist yet, and nothing that a kid puts into its
files can lead anywhere else. With - a file goes to standard output, and a directory
as a tar stream.`,
		Args: wants("KID:PATH", "FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			kid, where, err := kidPath(args[0])
			if err != nil {
				return err
			}
			if !dir {
				return a.getFile(cmd.Context(), kid, where, args[1])
			}
			return a.getDir(cmd.Context(), kid, where, args[1], skip)
		},
	}
	cmd.Flags().BoolVar(&dir, "dir", false, "PATH is a directory")
	cmd.Flags().BoolVar(&skip, "skip-special", false, "leave out links, FIFOs, sockets and devices, instead of refusing")
	return cmd
}

func (a *app) getFile(ctx context.Context, kid, where, to string) error {
	resp, err := a.carry(ctx, http.MethodGet, filesRoute(kid, where), nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close() // read whole
	if to == "-" {
		_, err := io.Copy(a.out, resp.Body)
		return broken(err)
	}
	mode, _ := strconv.ParseUint(resp.Header.Get("Tagout-Mode"), 8, 9) // 0: readable for nobody
	f, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return usage(err)
	}
	_, err = io.Copy(f, resp.Body)
	if err = errors.Join(broken(err), f.Chmod(fs.FileMode(mode)|0o600), f.Close()); err != nil {
		return errors.Join(err, os.Remove(to))
	}
	return nil
}

// broken says what it means that a stream of files ended early.
func broken(err error) error {
	if err != nil {
		return fmt.Errorf("copying out of the kid was broken off: what was being read changed, the kid was destroyed, or sandboxd ended (`tagout timeline` says which): %w", err)
	}
	return nil
}

func (a *app) getDir(ctx context.Context, kid, where, to string, skip bool) error {
	route := filesRoute(kid, where, "archive", "tar")
	if skip {
		route = filesRoute(kid, where, "archive", "tar", "skip", "special")
	}
	resp, err := a.carry(ctx, http.MethodGet, route, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close() // read whole
	if left := resp.Header.Get("Tagout-Left-Out"); left != "" && left != "0" {
		fmt.Fprintf(a.err, "tagout: %s links, FIFOs, sockets and devices were left out\n", left) // nobody is left to be told
	}
	if to == "-" {
		_, err := io.Copy(a.out, resp.Body)
		return broken(err)
	}
	if err := os.Mkdir(to, 0o755); err != nil {
		return usage(err)
	}
	root, err := os.OpenRoot(to)
	if err != nil {
		return err
	}
	defer root.Close() // only looked through
	return unpackDir(root, tar.NewReader(resp.Body))
}

// unpackDir writes an archive that a kid had a hand in: nothing leaves root, nothing is written over, and nothing is
// made but files and directories.
func unpackDir(root *os.Root, in *tar.Reader) error {
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return broken(err)
		}
		name := filepath.Clean(h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			err = root.MkdirAll(name, fs.FileMode(h.Mode).Perm()|0o700)
		case tar.TypeReg:
			err = unpackFile(root, name, fs.FileMode(h.Mode).Perm(), in)
		default:
			err = errors.New("it is neither a file nor a directory")
		}
		if err != nil {
			return fmt.Errorf("unpacking %q: %w", h.Name, err)
		}
	}
}

func unpackFile(root *os.Root, name string, mode fs.FileMode, src io.Reader) error {
	if err := root.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, src)
	return errors.Join(broken(err), f.Chmod(mode|0o600), f.Close())
}

// filesPage is how many entries are asked for at a time.
const filesPage = 1000

func (a *app) lsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls [KID[:DIRECTORY]]", Short: "List a directory of a kid (default: /workspace); without KID the kids, as list", Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return a.list(cmd, false)
			}
			kid, where := args[0], "/workspace"
			if strings.Contains(kid, ":") {
				var err error
				if kid, where, err = kidPath(args[0]); err != nil {
					return err
				}
			}
			all, err := a.listFiles(cmd, kid, where)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(all)
			}
			w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "MODE\tKIND\tSIZE\tMODIFIED\tNAME")
			for _, f := range all {
				fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\n", f.Mode, f.Kind, f.Size, f.Modified.Format(time.RFC3339), printable(f.Name))
			}
			return w.Flush()
		},
	}
}

func (a *app) listFiles(cmd *cobra.Command, kid, where string) ([]wire.File, error) {
	all := []wire.File{}
	for after := ""; ; after = all[len(all)-1].Name {
		var page []wire.File
		q := url.Values{"path": {where}, "after": {after}, "limit": {strconv.Itoa(filesPage)}}
		if err := a.call(cmd, instance.Sandboxd, http.MethodGet, "/v1/kids/"+url.PathEscape(kid)+"/files/list?"+q.Encode(), nil, &page); err != nil {
			return nil, err
		}
		all = append(all, page...)
		if len(page) < filesPage {
			return all, nil
		}
	}
}

// printable shows a name that a kid chose without letting it write to the terminal.
func printable(name string) string {
	quoted := strconv.Quote(name)
	if quoted == `"`+name+`"` {
		return name
	}
	return quoted
}
