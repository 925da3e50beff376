package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"tagout/deploy"
	"tagout/internal/card"
	"tagout/internal/cgroup"
	"tagout/internal/contain"
	"tagout/internal/wire"
)

// containVar tells the attempts in the kid what there is outside.
const containVar = "TAGOUT_CONTAIN"

func (a *app) containCommand() *cobra.Command {
	var image string
	cmd := &cobra.Command{
		Use: "contain", Short: "Try to break out of a kid in every way on the list, and say what was refused", Args: cobra.NoArgs,
		Long: `Spawn two kids, let one of them try to reach the other, this process and the machine,
and destroy both. Nothing that an attempt reaches is harmed. Ends with 1 where
anything was reached.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.contain(cmd.Context(), image) },
	}
	cmd.Flags().StringVar(&image, "image", card.HostImage, "try in kids with this image; in "+card.HostWritable+" as their root")
	inside := &cobra.Command{
		Use: "inside", Hidden: true, Args: cobra.NoArgs, Short: "Make the attempts here",
		RunE: func(*cobra.Command, []string) error {
			var t contain.Target
			if err := json.Unmarshal([]byte(os.Getenv(containVar)), &t); err != nil {
				return usage(fmt.Errorf("reading %s: %w", containVar, err))
			}
			return a.printJSON(contain.Run(t))
		},
	}
	cmd.AddCommand(inside)
	return cmd
}

func (a *app) contain(ctx context.Context, image string) (err error) {
	dir, err := os.MkdirTemp("", "tagout-contain-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir) // small
	target, closeAll, err := outside(dir)
	if err != nil {
		return fmt.Errorf("making what the kid is to reach: %w", err)
	}
	defer closeAll()
	text, err := containCard(image)
	if err != nil {
		return err
	}
	var both [2]wire.Kid
	for i := range both {
		req := wire.SpawnRequest{Purpose: "try to break out", Card: text, CardFile: "contain.yaml", InputDir: dir}
		if both[i], err = a.spawnNow(ctx, req); err != nil {
			return err
		}
		defer func() {
			gone, cancel := context.WithTimeout(context.WithoutCancel(ctx), destroyLimit)
			defer cancel()
			err = errors.Join(err, a.destroy(gone, both[i].Name, "its attempts are over"))
		}()
	}
	if target.Neighbour, err = somebodyIn(both[1]); err != nil {
		return err
	}
	results, err := a.attempt(ctx, both[0], target)
	if err != nil {
		return fmt.Errorf("letting kid %s try: %w", both[0].Name, err)
	}
	return a.showContain(results)
}

// containCard is the card of the kids, with another image in it.
func containCard(image string) (string, error) {
	if image != card.HostImage && image != card.HostWritable && !card.NamesImage(image) {
		return "", usage(fmt.Errorf("--image %s: name one of `tagout image ls`, %s or %s", image, card.HostImage, card.HostWritable))
	}
	text, err := deploy.Cards.ReadFile("cards/contain.yaml")
	return strings.Replace(string(text), "image: "+card.HostImage+"\n", "image: "+image+"\n", 1), err
}

// outside makes what the attempts are after in dir, this program as the kid's input among it. closeAll ends it.
func outside(dir string) (t contain.Target, closeAll func(), err error) {
	t = contain.Target{
		Dir: "/workspace", Marker: filepath.Join(dir, "marker"), PID: os.Getpid(), File: "/workspace/tagout",
		Socket: filepath.Join(dir, "socket"), Abstract: filepath.Base(dir), Env: ownVariable(), Disk: "/dev/none",
		Device: contain.ProgramDevice(),
	}
	if t.Host, err = os.Hostname(); err != nil {
		return t, nil, err
	}
	if disks, err := filepath.Glob("/sys/block/*"); err == nil && len(disks) > 0 {
		t.Disk = "/dev/" + filepath.Base(disks[len(disks)-1])
	}
	err = errors.Join(os.Chmod(dir, 0o755), os.WriteFile(t.Marker, []byte("outside\n"), 0o644), copyProgram(filepath.Join(dir, "tagout"))) // for everybody, on purpose
	var open []io.Closer
	closeAll = func() {
		for _, c := range open {
			c.Close() // nobody was served
		}
	}
	for _, addr := range []string{t.Socket, "@" + t.Abstract} {
		l, lerr := net.Listen("unix", addr)
		if lerr != nil {
			closeAll()
			return t, nil, errors.Join(err, lerr)
		}
		open = append(open, l)
	}
	return t, closeAll, err
}

// ownVariable is a variable of this process's that no kid gets.
func ownVariable() string {
	kids := []string{"PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "LANG"}
	for _, pair := range os.Environ() {
		if name, value, _ := strings.Cut(pair, "="); value != "" && !slices.Contains(kids, name) {
			return pair
		}
	}
	return "TAGOUT_OUTSIDE=1" // there is nothing to find
}

func copyProgram(to string) error {
	from, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer from.Close() // only read
	f, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, from)
	return errors.Join(err, f.Close())
}

// somebodyIn returns the pid of a process in the kid.
func somebodyIn(kid wire.Kid) (int, error) {
	pids, err := cgroup.Procs(kid.Cgroup)
	if err == nil && len(pids) == 0 {
		err = errors.New("there is none")
	}
	if err != nil {
		return 0, fmt.Errorf("looking for a process in kid %s: %w", kid.Name, err)
	}
	return pids[0], nil
}

// attempt lets the kid try.
func (a *app) attempt(ctx context.Context, kid wire.Kid, t contain.Target) ([]contain.Result, error) {
	raw, err := json.Marshal(t)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	in := &app{instance: a.instance, in: bytes.NewReader(nil), out: &out, err: a.err}
	if err := in.exec(ctx, kid.Name, []string{"/workspace/tagout", "contain", "inside"}, execFlags{env: []string{containVar + "=" + string(raw)}}); err != nil {
		return nil, err
	}
	var results []contain.Result
	if err := json.Unmarshal(out.Bytes(), &results); err != nil || len(results) == 0 {
		return nil, fmt.Errorf("reading what it tried: %q: %w", out.String(), err)
	}
	return results, nil
}

// showContain prints a line a class, and each attempt that reached something.
func (a *app) showContain(results []contain.Result) error {
	if a.json {
		if err := a.printJSON(results); err != nil {
			return err
		}
	} else {
		a.containTable(results)
	}
	if reached := contain.Reached(results); reached != "" {
		return fmt.Errorf("the kid reached what it must not: %s", reached)
	}
	return nil
}

func (a *app) containTable(results []contain.Result) {
	var classes []string
	tried, reached := map[string]int{}, map[string]int{}
	for _, r := range results {
		if tried[r.Class]++; tried[r.Class] == 1 {
			classes = append(classes, r.Class)
		}
		if r.Reached {
			reached[r.Class]++
		}
	}
	w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "VERDICT\tCLASS\tATTEMPTS")
	for _, class := range classes {
		verdict := "refused"
		if reached[class] > 0 {
			verdict = "REACHED"
		}
		fmt.Fprintf(w, "%s\t%s\t%d\n", verdict, class, tried[class])
	}
	w.Flush() // nobody is left to be told
}
