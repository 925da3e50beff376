package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/clockstep"
	"tagout/internal/config"
	"tagout/internal/drill"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// TestTokensExpire: a card's identity.lifetime ends a token, and what is under way with it, where the box would let it live
// longer; where the box allows less, that counts. With -stop.wallclock this machine's clock is set an hour forward
// meanwhile and back again, which neither ends a token nor lets it live on.
func TestTokensExpire(t *testing.T) {
	t.Parallel()
	box := testenv.StartWith(t, func(b *config.Box) { b.TokenLifetime = time.Hour })
	box.SetSecret(secret, box.Net.Secret(), "api.vendor.test:443")
	const life = 12 * time.Second // a busy machine takes seconds to spawn
	brief := strings.Replace(card, "identity:\n", "identity:\n  lifetime: 12s\n", 1)
	long := strings.Replace(card, "identity:\n", "identity:\n  lifetime: 720h\n", 1)
	other := box.Spawn(long, hostile(t, box))
	if left := lifeLeft(t, box, other.Name); left < 59*time.Minute || left > time.Hour {
		t.Errorf("the card asks for 720 h, the box allows 1 h: %v are left", left)
	}
	minted := bootclock.Now()
	kid := box.Spawn(brief, hostile(t, box))
	if left := lifeLeft(t, box, kid.Name); left <= 0 || left > life {
		t.Fatalf("the card asks for %v, the box allows 1 h: %v are left", life, left)
	}
	var step *clockstep.Step
	if *wallClock {
		var err error
		if step, err = clockstep.Start(t.Context(), []string{filepath.Join(box.Bin, "tagout"), "drill", "hold-clock"}, drill.ClockStep); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { step.Back() }) // back already, where all went well
	}
	use := "curl -sk --noproxy '*' -w ' %{http_code}' -H \"Authorization: Bearer $VENDOR_API_KEY\" "
	if out := box.Sh(kid.Name, use+"https://api.vendor.test/v1/whoami"); !strings.Contains(out.Stdout, " 200") {
		t.Fatalf("a use %v after the token was minted: %q", bootclock.Now()-minted, out.Stdout)
	}
	// A body that would go on for a minute, and longer than the token.
	streaming := running(t, box, kid.Name, "/bin/bash", "-c", "for i in $(seq 600); do echo more; sleep 0.1; done | "+use+"-T - https://api.vendor.test/v1/stream -X POST; echo over")
	if step != nil {
		if _, err := step.Back(); err != nil {
			t.Fatalf("setting the clock back: %v", err)
		}
	}
	wait(t, "the stream", streaming)
	if lived := bootclock.Now() - minted; lived < life || lived > life+10*time.Second {
		t.Errorf("what was under way ended %v after the token was minted, for %v", lived, life)
	}
	box.WaitRecord("the proxy's cut", func(r *audit.Record) bool {
		return r.Kid == kid.Name && r.Reason == reason.TokenUnknown && strings.Contains(r.Detail, "expired")
	})
	box.WaitRecord("the token's end", func(r *audit.Record) bool { return r.Kid == kid.Name && r.Event == audit.EventTokenExpired })
	if out := box.Sh(kid.Name, use+"https://api.vendor.test/v1/whoami"); !strings.Contains(out.Stdout, " 403") {
		t.Errorf("a use after the token's end: %q", out.Stdout)
	}
	if out := box.Sh(other.Name, use+"https://api.vendor.test/v1/whoami"); !strings.Contains(out.Stdout, " 200") {
		t.Errorf("another session's token, control: %q", out.Stdout)
	}
}

// lifeLeft is how long the kid's token lives on.
func lifeLeft(t *testing.T, box *testenv.Box, kid string) time.Duration {
	t.Helper()
	var infos []wire.TokenInfo
	if err := box.Client(instance.Credd).Call(t.Context(), "GET", fmt.Sprintf("/v1/tokens?kid=%s", kid), nil, &infos); err != nil || len(infos) != 1 {
		t.Fatalf("tokens of %s: %+v, %v", kid, infos, err)
	}
	return infos[0].Left
}
