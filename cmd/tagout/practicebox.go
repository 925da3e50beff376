package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"time"

	"tagout/deploy"
	"tagout/internal/card"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// runner runs the daemons inside this process's own lifetime.
type runner struct {
	a      *app
	bin    string
	cancel context.CancelFunc
	ended  chan error
}

// start returns when all daemons are healthy.
func (r *runner) start(ctx context.Context, inst instance.Instance) error {
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ready := make(chan struct{})
	r.cancel, r.ended = cancel, make(chan error, 1)
	go func() {
		r.ended <- r.a.up(run, inst, r.bin, slog.New(slog.DiscardHandler), func() { close(ready) })
	}()
	select {
	case <-ready:
		return nil
	case err := <-r.ended:
		cancel()
		r.cancel = nil // nothing is left to stop
		return err
	case <-ctx.Done():
		return errors.Join(ctx.Err(), r.stop())
	}
}

// stop ends the daemons and waits for them; before start it does nothing.
func (r *runner) stop() error {
	if r.cancel == nil {
		return nil
	}
	r.cancel()
	r.cancel = nil
	return <-r.ended
}

// practiceBox is a box of its own on a practice internet, made for one command and gone with it.
type practiceBox struct {
	inst     instance.Instance
	net      *practice.Internet
	card     []byte // drill.yaml
	inputDir string // holds the hostile binary
}

// withPracticeBox makes the box, runs fn and removes everything, whatever happened.
func (a *app) withPracticeBox(ctx context.Context, name, bin, cardFile string, fn func(practiceBox) error) (err error) {
	if _, err := instance.Open(name); err == nil {
		return usage(fmt.Errorf("instance %s exists: choose another --instance, or run `tagout cleanup --purge --instance %s` first", name, name))
	}
	p := practiceBox{}
	if p.inst, err = instance.Claim(name); err != nil {
		return err
	}
	r := &runner{a: a, bin: bin}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		err = errors.Join(err, r.stop())
		if p.net != nil {
			err = errors.Join(err, p.net.Close())
		}
		err = errors.Join(err, boxes().Cleanup(ctx, name, true), os.RemoveAll(p.inputDir))
	}()
	if p.net, err = practice.Start(ctx, practice.Options{Instance: p.inst, CreddSocket: p.inst.Socket(instance.Credd)}); err != nil {
		return err
	}
	cfg := p.net.BoxConfig()
	if _, err := boxes().Setup(ctx, name, &cfg); err != nil {
		return err
	}
	if err := r.start(ctx, p.inst); err != nil {
		return err
	}
	if err := p.prepare(ctx, bin, cardFile); err != nil {
		return err
	}
	return fn(p)
}

// prepare lays out the agent and puts the practice secret under the name that the card asks for.
func (p *practiceBox) prepare(ctx context.Context, bin, cardFile string) error {
	var err error
	if cardFile == "" {
		p.card, err = deploy.Cards.ReadFile("cards/drill.yaml")
	} else {
		p.card, err = os.ReadFile(cardFile)
	}
	if err != nil {
		return usage(fmt.Errorf("reading the drill's card: %w", err))
	}
	parsed, err := card.Parse(cardFile, p.card)
	if err != nil {
		return err
	}
	dir, err := binDir(bin)
	if err != nil {
		return err
	}
	agent, err := os.ReadFile(filepath.Join(dir, "hostile"))
	if err != nil {
		return fmt.Errorf("reading the agent: run `make build` first: %w", err)
	}
	if p.inputDir, err = os.MkdirTemp("", "tagout-drill-"); err != nil {
		return fmt.Errorf("making a directory for the agent: %w", err)
	}
	if err := os.WriteFile(filepath.Join(p.inputDir, "hostile"), agent, 0o755); err != nil { //nolint:gosec // a program
		return fmt.Errorf("placing the agent: %w", err)
	}
	credd := control.NewClient(p.inst.Socket(instance.Credd))
	defer credd.CloseIdle()
	for _, s := range parsed.Identity.Scope {
		entry := wire.VaultEntry{Value: p.net.Secret(), Hosts: []string{practice.NameAPI + ":443"}}
		if err := credd.Call(ctx, http.MethodPut, "/v1/vault/"+s.Name, entry, nil); err != nil {
			return fmt.Errorf("putting %s into the vault: %w", s.Name, err)
		}
	}
	return nil
}

// cardDir returns dir, or where it is "" a fresh directory with the cards that this binary carries; remove
// takes away what was made.
func cardDir(dir string) (cards string, remove func(), err error) {
	if dir != "" {
		return dir, func() {}, nil
	}
	tmp, err := os.MkdirTemp("", "tagout-cards-")
	if err != nil {
		return "", nil, fmt.Errorf("placing the cards: %w", err)
	}
	remove = func() { os.RemoveAll(tmp) } //nolint:errcheck // in the temporary directory
	files, err := fs.Glob(deploy.Cards, "cards/*.yaml")
	for _, f := range files {
		var raw []byte
		if raw, err = deploy.Cards.ReadFile(f); err == nil {
			err = os.WriteFile(filepath.Join(tmp, path.Base(f)), raw, 0o644) //nolint:gosec // not secret
		}
		if err != nil {
			break
		}
	}
	if err != nil {
		remove()
		return "", nil, fmt.Errorf("placing the cards: %w", err)
	}
	return tmp, remove, nil
}
