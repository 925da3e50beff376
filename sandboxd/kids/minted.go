package kids

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"time"

	"tagout/internal/bootclock"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/wire"
	"tagout/sandboxd/files"
	"tagout/sandboxd/runtime"
)

// mintedMode is the mode of a file with a JWT: only the kid's own user reads it.
const mintedMode = 0o400

func checkMints(mints []session.Mint) error {
	for _, t := range mints {
		switch {
		case (t.Env == "") == (t.File == ""):
			return refuse(Invalid, reason.Malformed, "the token %s is neither for a variable nor for a file", t.Name)
		case t.File != "" && !strings.HasPrefix(t.File, runtime.Home+"/"):
			return refuse(Invalid, reason.Malformed, "the file of the token %s is not below %s", t.Name, runtime.Home)
		case t.Env != "":
			if err := checkEnv(t.Env); err != nil {
				return err
			}
		}
	}
	return nil
}

// mintsOf is what credd is asked to mint beside tokens for the vault's secrets.
func mintsOf(s *session.Session) []wire.MintToken {
	var out []wire.MintToken
	for _, t := range s.Mints {
		out = append(out, wire.MintToken{Name: t.Name, Audience: t.Audience, Scope: t.Scope, Lifetime: t.Lifetime, Hosts: t.Hosts, Inside: t.File != ""})
	}
	return out
}

// takeMinted keeps what credd minted. A JWT for a file is kept nowhere but in this process, until it is in its place.
func (k *kid) takeMinted(reply wire.MintReply) error {
	k.renewAt = bootclock.Now() + reply.Renew
	for _, t := range k.rec.Session.Mints {
		token := reply.Tokens[t.Name]
		switch {
		case token == "":
			return refuse(Unavailable, reason.CreddDown, "credd gave no token %s", t.Name)
		case t.File != "":
			k.minted = append(k.minted, files.Text{To: strings.TrimPrefix(t.File, runtime.Home+"/"), Text: token, Mode: mintedMode})
		default:
			k.rec.Tokens[t.Env] = token
		}
	}
	return nil
}

// placeMinted puts the JWTs that the card asks for into their files. The workspace is mounted and nothing of the kid's own
// runs yet.
func (m *Manager) placeMinted(_ context.Context, k *kid) error {
	if len(k.minted) == 0 {
		return nil
	}
	err := files.Write(m.workspaceDir(k), k.minted, m.owner(k))
	k.minted = nil
	if err != nil {
		return refuse(Invalid, reason.Malformed, "giving the kid its tokens: %w", err)
	}
	return nil
}

// renewEvery is how often JWTs are looked for that are to be renewed; renewRetry is how long it takes after a failure.
const (
	renewEvery = 500 * time.Millisecond
	renewRetry = 2 * time.Second
)

// keepMinted puts new JWTs into kids' files before those that are there expire, until ctx ends.
func (m *Manager) keepMinted(ctx context.Context) {
	tick := time.NewTicker(renewEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, k := range m.inState(wire.KidRunning, wire.KidPaused) {
			if k.holdsJWTs() && bootclock.Now() >= k.renewAt {
				m.renewMinted(ctx, k)
			}
		}
	}
}

// holdsJWTs needs no lock: a plan's tokens never change.
func (k *kid) holdsJWTs() bool {
	return slices.ContainsFunc(k.rec.Plan.Mints, func(t session.Mint) bool { return t.File != "" })
}

// renewMinted asks credd for the kid's JWTs and puts them into their files, each whole or not at all. What the kid has made of
// its files meanwhile is its own affair: it is logged once, and tried again.
func (m *Manager) renewMinted(ctx context.Context, k *kid) {
	ask, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	reply, err := m.cfg.Credentials.Renew(ask, k.name)
	if err != nil && KindOf(err) != Internal {
		k.renewAt = never // credd has said that there are none any more
		return
	}
	if err == nil {
		err = m.putMinted(k, reply.Tokens)
	}
	if err != nil {
		k.renewAt = bootclock.Now() + renewRetry
		if !k.renewFails {
			m.cfg.Log.Warn("renewing the tokens in a kid's files; trying again", "kid", k.name, "error", err)
		}
		k.renewFails = true
		return
	}
	k.renewAt, k.renewFails = bootclock.Now()+reply.Renew, false
	if reply.Renew == 0 {
		k.renewAt = never
	}
}

const never = time.Duration(math.MaxInt64)

func (m *Manager) putMinted(k *kid, tokens map[string]string) error {
	if !k.life.TryLock() {
		return errors.New("its life is about to change")
	}
	defer k.life.Unlock()
	if !slices.Contains(m.inState(wire.KidRunning, wire.KidPaused), k) {
		return errors.New("it has ended")
	}
	tree, err := files.OpenHost(m.workspaceDir(k), m.owner(k))
	if err != nil {
		return err
	}
	defer tree.Close()
	var errs []error
	for _, t := range k.rec.Plan.Mints {
		if token := tokens[t.Name]; t.File != "" && token != "" {
			_, err := tree.Put(strings.TrimPrefix(t.File, runtime.Home+"/"), mintedMode, strings.NewReader(token))
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
