package kids

import (
	"context"
	"strings"

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
func (k *kid) takeMinted(tokens map[string]string) error {
	for _, t := range k.rec.Session.Mints {
		token := tokens[t.Name]
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
