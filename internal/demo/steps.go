package demo

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"tagout/internal/drill"
	"tagout/internal/instance"
	"tagout/internal/practice"
)

//go:embed escape.sh
var escapeScript []byte

// buildInternet takes the instance's slot, because the slot gives the addresses.
func (s *show) buildInternet(ctx context.Context) error {
	var err error
	if s.inst, err = instance.ClaimNew(s.Instance); err != nil {
		return err
	}
	s.net, err = practice.Start(ctx, practice.Options{Instance: s.inst, CreddSocket: s.inst.Socket(instance.Credd)})
	if err != nil {
		return err
	}
	fmt.Fprintf(s.Out, "  %s in a network namespace of its own: DNS, %s, %s, %s, an alert webhook, %s\n",
		s.inst.PracticeNet(), practice.NameAPI, practice.NameFiles, practice.NameTicks, practice.NameEvil)
	return nil
}

// startBox sets the box up, starts it and puts the vendor's secret into its vault.
func (s *show) startBox(ctx context.Context) error {
	if err := s.readCards(); err != nil {
		return err
	}
	box := s.net.BoxConfig()
	if err := s.Setup(ctx, s.Instance, &box); err != nil {
		return err
	}
	if err := s.placeInputs(); err != nil {
		return err
	}
	if err := s.Up(ctx, s.inst); err != nil {
		return err
	}
	secret, err := drill.Equip(ctx, s.inst, s.net, "practice.yaml", s.ev.practiceCard)
	if err != nil {
		return err
	}
	s.ev.secret = []byte(s.net.Secret())
	for _, d := range instance.Daemons() {
		fmt.Fprintf(s.Out, "  %-12s %s\n", d, s.runsAs(d))
	}
	fmt.Fprintf(s.Out, "  secret %s is in the vault, for %s alone\n", secret, practice.NameAPI)
	return nil
}

// runsAs says as whom a daemon runs, from /proc and not from what it was told.
func (s *show) runsAs(daemon string) string {
	raw, err := os.ReadFile(s.inst.PidFile(daemon))
	pid := string(bytes.TrimSpace(raw))
	if err != nil {
		return "runs (no pid file)"
	}
	status, err := os.ReadFile(filepath.Join("/proc", filepath.Base(pid), "status"))
	if err != nil {
		return "pid " + pid
	}
	field := func(name string) string {
		for _, line := range bytes.Split(status, []byte("\n")) {
			if f := bytes.Fields(line); len(f) > 1 && string(f[0]) == name {
				return string(f[1])
			}
		}
		return "?"
	}
	return fmt.Sprintf("pid %s, uid %s, capabilities %s", pid, field("Uid:"), field("CapEff:"))
}

func (s *show) readCards() error {
	var err error
	if s.ev.practiceCard, err = fs.ReadFile(s.Cards, "practice.yaml"); err != nil {
		return fmt.Errorf("reading the practice card: %w", err)
	}
	if s.ev.chatCard, err = fs.ReadFile(s.Cards, "chat.yaml"); err != nil {
		return fmt.Errorf("reading the chat card: %w", err)
	}
	if s.ev.drillCard, err = fs.ReadFile(s.Cards, "drill.yaml"); err != nil {
		return fmt.Errorf("reading the drill card: %w", err)
	}
	return nil
}

// placeInputs lays out the directory from which the kids' inputs are taken: within the instance, so that a cleanup
// finds it where this process was killed.
func (s *show) placeInputs() error {
	s.inputs = filepath.Join(s.inst.RunDir(), "inputs")
	if err := os.Mkdir(s.inputs, 0o700); err != nil {
		return fmt.Errorf("making a directory for the kids' inputs: %w", err)
	}
	hostile, err := os.ReadFile(filepath.Join(s.BinDir, "hostile"))
	if err != nil {
		return fmt.Errorf("reading the agent: run `make build` first: %w", err)
	}
	chat, err := os.ReadFile(filepath.Join(s.BinDir, "chat"))
	if err != nil {
		return fmt.Errorf("reading the model's client: run `make build` first: %w", err)
	}
	for name, data := range map[string][]byte{"hostile": hostile, "chat": chat, "escape.sh": escapeScript} {
		if err := os.WriteFile(filepath.Join(s.inputs, name), data, 0o755); err != nil { // programs
			return fmt.Errorf("writing the input %s: %w", name, err)
		}
	}
	return nil
}

// cleanUp removes everything, whatever is there of it, and looks whether something is left.
func (s *show) cleanUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupWithin)
	defer cancel()
	var errs []error
	if s.inst.Name() == "" {
		s.ev.leftovers, s.ev.looked = nil, true // no slot was taken, so nothing can be there
		return nil
	}
	if s.Down != nil {
		errs = append(errs, s.Down(ctx, s.inst))
	}
	if s.net != nil {
		errs = append(errs, s.net.Close())
	}
	err := s.Cleanup(ctx, s.Instance)
	if err == nil {
		err = s.inst.Release() // a box that was never set up has a slot all the same
	}
	errs = append(errs, err)
	left, err := s.Leftovers(ctx, s.Instance)
	s.ev.leftovers = append(left, practice.Leftovers(s.inst)...)
	s.ev.looked = err == nil
	errs = append(errs, err)
	for _, l := range s.ev.leftovers {
		fmt.Fprintf(s.Out, "  left: %s\n", l)
	}
	if len(s.ev.leftovers) == 0 && err == nil {
		fmt.Fprintln(s.Out, "  no namespace, link, cgroup, mount, BPF pin, firewall rule, process or file is left")
	}
	return errors.Join(errs...)
}

// indent puts two spaces before each line; writes must hold whole lines.
type indent struct{ w io.Writer }

func (i indent) Write(p []byte) (int, error) {
	for _, line := range bytes.Split(bytes.TrimRight(p, "\n"), []byte("\n")) {
		if _, err := fmt.Fprintf(i.w, "  %s\n", line); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}
