package main

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/authority"
	"tagout/internal/authority/keyfile"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// signer is what the commands that sign orders share. The private key stays in this process.
type signer struct {
	key, passphraseFile, box string
	valid, most              time.Duration // for how long an order is good, and may be
	printOnly                bool
}

func (s *signer) flags(cmd *cobra.Command) {
	s.keyFlags(cmd)
	cmd.Flags().BoolVar(&s.printOnly, "print", false, "print the signed order and send it nowhere; 'tagout order' delivers it")
}

// keyFlags are those of commands whose order goes with something else, at once.
func (s *signer) keyFlags(cmd *cobra.Command) { s.keyFlagsFor(cmd, authority.Life, authority.MaxLife) }

func (s *signer) keyFlagsFor(cmd *cobra.Command, life, most time.Duration) {
	s.most = most
	cmd.Flags().StringVar(&s.key, "key", "", "sign the order with the private key in this file")
	cmd.Flags().StringVar(&s.passphraseFile, "passphrase-file", "", "what decrypts the key")
	cmd.Flags().DurationVar(&s.valid, "valid", life, "for how long the signed order is good, at most "+short(most))
	cmd.Flags().StringVar(&s.box, "box", "", "id of the box that the order is for (default: this one's)")
}

// short is a duration without the zeros at its end.
func short(d time.Duration) string {
	return strings.TrimSuffix(strings.TrimSuffix(d.String(), "0s"), "0m")
}

// used says whether the order is to be signed; flags that make sense only then are refused otherwise.
func (s *signer) used(cmd *cobra.Command) (bool, error) {
	if s.key != "" {
		return true, nil
	}
	for _, f := range []string{"passphrase-file", "valid", "print", "box"} {
		if cmd.Flags().Changed(f) {
			return false, usage(fmt.Errorf("--%s is about a signed order: give --key as well", f))
		}
	}
	return false, nil
}

// needs is used, for orders that a name can give where no key counts: without --key they need --by. flags are needed in
// either case.
func (s *signer) needs(cmd *cobra.Command, flags ...string) (signed bool, err error) {
	if signed, err = s.used(cmd); err != nil {
		return false, err
	}
	if !signed {
		flags = append(flags, "by")
	}
	return signed, needFlags(cmd, flags...)
}

// sign completes an order and signs it. o.By may be empty: then the box's list says whose key it is.
func (s *signer) sign(a *app, o authority.Order) (wire.SignedOrder, error) {
	if s.valid < time.Second || s.valid > s.most {
		return wire.SignedOrder{}, usage(fmt.Errorf("--valid %s: give a time from 1s to %s", s.valid, short(s.most)))
	}
	public, err := keyfile.Public(s.key)
	if err != nil {
		return wire.SignedOrder{}, err
	}
	o.Box = s.box
	if o.Box == "" || o.By == "" {
		if err := s.fill(a, &o, public); err != nil {
			return wire.SignedOrder{}, err
		}
	}
	passphrase, err := a.readPassphrase(s.passphraseFile)
	if err != nil {
		return wire.SignedOrder{}, err
	}
	defer clear(passphrase)
	private, err := keyfile.Private(s.key, passphrase)
	if err != nil {
		return wire.SignedOrder{}, err
	}
	raw, err := authority.Sign(authority.New(o, time.Now(), s.valid), private)
	if err != nil {
		return wire.SignedOrder{}, usage(err)
	}
	return wire.SignedOrder{Note: string(raw)}, nil
}

// fill takes what the command line does not say from the list of the box on this machine.
func (s *signer) fill(a *app, o *authority.Order, public string) error {
	inst, err := a.open()
	if err != nil {
		return fmt.Errorf("%w; away from the box, give --box, --by and --print", err)
	}
	list, err := authority.NewBook(inst.AuthorityFile(), 0).List()
	if err != nil {
		return err
	}
	if o.Box == "" {
		o.Box = list.Box
	}
	for _, p := range list.People {
		if o.By == "" && authority.SameKey(p.Key, public) {
			o.By = p.Name
		}
	}
	if o.By == "" {
		return &coded{exitRefused, fmt.Errorf("the key %s is not on this box's authority list: put it there and run `tagout setup`", authority.KeyID(public))}
	}
	return nil
}

// giveSigned signs an order and sends it, or only prints it.
func (a *app) giveSigned(cmd *cobra.Command, s *signer, o authority.Order) error {
	order, err := s.sign(a, o)
	switch {
	case err != nil && o.Action == authority.ActionStop && !s.printOnly:
		return notStopped(err)
	case err != nil:
		return err
	case s.printOnly:
		return a.printOrder(order)
	}
	err = a.give(cmd, "/v1/order", order)
	if o.Action == authority.ActionStop && control.Status(err) == http.StatusForbidden {
		return notStopped(err)
	}
	return err
}

func (a *app) printOrder(order wire.SignedOrder) error {
	if a.json {
		return a.printJSON(order)
	}
	a.printf("%s", order.Note)
	return nil
}

// changeSigned signs an order that changes what a kid can reach and sends it, or only prints it. with is what goes with
// the signature.
func (a *app) changeSigned(cmd *cobra.Command, s *signer, o authority.Order, with wire.SignedOrder) error {
	order, err := s.sign(a, o)
	if err != nil {
		return err
	}
	if s.printOnly {
		return a.printOrder(order)
	}
	with.Note = order.Note
	return a.change(cmd, with)
}

// change brings a signed order to sandboxd and says what it came to.
func (a *app) change(cmd *cobra.Command, order wire.SignedOrder) error {
	var reply wire.OrderReply
	if err := a.call(cmd, instance.Sandboxd, http.MethodPost, "/v1/order", order, &reply); err != nil {
		return err
	}
	switch {
	case reply.Grant != nil:
		return a.showGrant(*reply.Grant)
	case reply.Policy != nil:
		return a.showPolicy(*reply.Policy)
	case a.json:
		return a.printJSON(struct{}{})
	}
	a.printf("the grant is gone; what lived on it is cut\n")
	return nil
}

// notStopped says what a refused signature means, and what to do at once.
func notStopped(err error) error {
	return fmt.Errorf("NOTHING WAS STOPPED: %w; root on the box can stop without a key: leave --key away and give --by", err)
}
