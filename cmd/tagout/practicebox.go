package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"tagout/deploy"
	"tagout/internal/card"
	"tagout/internal/config"
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
		r.ended <- r.a.up(run, inst, r.bin, "", slog.New(slog.DiscardHandler), func() { close(ready) })
	}()
	select {
	case <-ready:
		awaitProof(ctx, inst)
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

// ownInstance takes an instance for a command that makes and removes one of its own.
func ownInstance(name string) (instance.Instance, error) {
	if err := mayOwn(name); err != nil {
		return instance.Instance{}, err
	}
	inst, err := instance.ClaimNew(name)
	if errors.Is(err, instance.ErrExists) {
		err = usage(err)
	}
	return inst, err
}

// mayOwn refuses what ownInstance could not make a box of, before anything is printed or made.
func mayOwn(name string) error {
	if err := instance.CheckName(name); err != nil {
		return usage(err)
	}
	if err := needRoot("making instance " + name); err != nil {
		return err
	}
	if _, err := instance.Open(name); err == nil {
		return usage(instance.Exists(name))
	}
	return nil
}

// practiceBox is a box of its own on a practice internet, made for one command and gone with it.
type practiceBox struct {
	inst     instance.Instance
	net      *practice.Internet
	card     []byte // drill.yaml
	inputDir string // holds the hostile binary
}

// withPracticeBox makes the box, runs fn and removes everything, whatever happened.
func (a *app) withPracticeBox(ctx context.Context, name, bin, cardFile string, fn func(practiceBox) error) error {
	return a.withPracticeBoxOf(ctx, name, bin, cardFile, func(instance.Instance, *config.Box) error { return nil }, fn)
}

// withPracticeBoxOf is withPracticeBox with something to be done before the box is set up, such as a change to its
// configuration. A cleanup must find what that makes.
func (a *app) withPracticeBoxOf(ctx context.Context, name, bin, cardFile string, before func(instance.Instance, *config.Box) error, fn func(practiceBox) error) (err error) {
	p := practiceBox{}
	if p.inst, err = ownInstance(name); err != nil {
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
		err = errors.Join(err, boxes().Cleanup(ctx, name, true))
	}()
	if p.net, err = practice.Start(ctx, practice.Options{Instance: p.inst, CreddSocket: p.inst.Socket(instance.Credd)}); err != nil {
		return err
	}
	cfg := p.net.BoxConfig()
	if err := before(p.inst, &cfg); err != nil {
		return err
	}
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
	p.inputDir = filepath.Join(p.inst.RunDir(), "inputs") // within the instance, so that a cleanup finds it
	if err := os.Mkdir(p.inputDir, 0o700); err != nil {
		return fmt.Errorf("making a directory for the agent: %w", err)
	}
	if err := os.WriteFile(filepath.Join(p.inputDir, "hostile"), agent, 0o755); err != nil { // a program
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

// cards are the files in dir, or where it is "" those that this binary carries.
func cards(dir string) (fs.FS, error) {
	if dir != "" {
		return os.DirFS(dir), nil
	}
	return fs.Sub(deploy.Cards, "cards")
}
