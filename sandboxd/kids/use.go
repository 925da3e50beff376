package kids

import (
	"context"
	"time"

	"tagout/internal/wire"
)

// askUse bounds how long a destroy waits to hear what the kid's credentials were used for: it is good to know, and nothing
// depends on it.
const askUse = time.Second

// CredentialUse says what the kid has made of the secrets that its card names, for people; nil where nobody knows: there is
// no such kid, or credd does not answer or has started since.
func (m *Manager) CredentialUse(ctx context.Context, name string) *wire.CredentialUse {
	m.mu.Lock()
	k := m.kids[name]
	m.mu.Unlock()
	if k == nil || wire.IsProofKid(name) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, askUse)
	defer cancel()
	use, err := m.cfg.Credentials.Use(ctx, name)
	if err != nil {
		m.cfg.Log.Warn("asking credd what a kid used of what it was granted", "kid", name, "error", err)
		return nil
	}
	return use
}
