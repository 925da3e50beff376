package e2e

import (
	"errors"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/config"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/provider/providertest"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// leasingBox is a box whose vendor secret is leased from an OpenBao of the practice internet.
func leasingBox(t *testing.T) (*testenv.Box, *providertest.Bao) {
	t.Helper()
	bao := providertest.NewBao()
	box := testenv.StartWith(t, func(c *config.Box) {
		c.Providers = []config.Provider{{Name: "bao", Kind: config.ProviderOpenBao, URL: "https://bao.own.test:8200", Mount: "approle",
			SecretRoleID: "bao_role", SecretSecretID: "bao_secret", Timeout: 500 * time.Millisecond,
			Roles: []config.ProviderRole{{Name: "readonly", Path: "database/creds/readonly", Value: "password"}}}}
	})
	if err := box.Net.Host("bao.own.test", 8200, bao); err != nil {
		t.Fatal(err)
	}
	box.SetSecret("bao_role", bao.RoleID, "bao.own.test:8200")
	box.SetSecret("bao_secret", bao.SecretID, "bao.own.test:8200")
	box.Must("vault", "set", secret, "--lease", "bao/readonly", "--host", "api.vendor.test:443")
	return box, bao
}

// TestALeasedSecretDiesAtItsProvider (invariants 3, 5): a kid uses a secret that was leased for it, and holds a token. A
// stop takes the token, then the provider takes the lease back, which the provider's own word shows. A provider that
// hangs makes the command say what is still valid, and until when; a credd that is killed meanwhile leaves it to the next.
func TestALeasedSecretDiesAtItsProvider(t *testing.T) {
	t.Parallel()
	box, bao := leasingBox(t)
	bao.Password = box.Net.Secret()
	kid := box.Spawn(card, hostile(t, box))
	out := box.Sh(kid.Name, "/workspace/hostile whoami https://api.vendor.test/v1/whoami; env")
	if !strings.Contains(out.Stdout, "accepted=true") || !strings.Contains(out.Stdout, "VENDOR_API_KEY=tgo_") || strings.Contains(out.Stdout, box.Net.Secret()) {
		t.Fatalf("the leased secret was not used, or was seen: %q %q", out.Stdout, out.Stderr)
	}
	if !bao.Accepts(box.Net.Secret()) || bao.Live() != 1 || bao.Logins() != 1 {
		t.Fatalf("%d leases, %d logins: the test shows nothing", bao.Live(), bao.Logins())
	}
	said := box.Must("stop", "--kid", kid.Name, "--by", practice.Authority, "--reason", "test")
	if !strings.Contains(said, "lease      revoked") || bao.Live() != 0 || bao.Logins() != 0 {
		t.Errorf("%d leases are left, %d logins: %s", bao.Live(), bao.Logins(), said)
	}
	revoked := box.WaitRecord("the tokens' revocation", func(r *audit.Record) bool { return r.Event == audit.EventTokenRevoked && r.Kid == kid.Name })
	lease := box.WaitRecord("the lease's revocation", func(r *audit.Record) bool { return r.Event == audit.EventLeaseRevoked && r.Kid == kid.Name })
	if lease.Boot < revoked.Boot || lease.Fields["took"] == "" || lease.Fields["provider"] != "bao" {
		t.Errorf("%+v before %+v", lease, revoked)
	}

	held := box.Spawn(card, hostile(t, box))
	bao.SetFault(providertest.Hang)
	begun := time.Now()
	r := box.Tagout("stop", "--kid", held.Name, "--by", practice.Authority, "--reason", "test", "--wait-leases", "3s")
	if r.Code != 5 || !strings.Contains(r.Stdout, "still valid until") || !strings.Contains(r.Stderr, "may still take 1 lease") {
		t.Errorf("a provider that hangs: %d after %v: %s%s", r.Code, time.Since(begun), r.Stdout, r.Stderr)
	}
	if !strings.Contains(r.Stdout, "credential observed") {
		t.Errorf("the layer waited for the provider: %s", r.Stdout)
	}
	if listed := box.Must("leases", "ls", "--open"); !strings.Contains(listed, "still-valid") || !strings.Contains(listed, held.Name) {
		t.Errorf("leases: %s", listed)
	}

	if _, err := box.TrySpawn("", card, hostile(t, box)); err == nil || !strings.Contains(err.Error(), "leasing "+secret+" from bao") {
		t.Errorf("a spawn without its lease: %v", err)
	}
	box.Kill9(instance.Credd)
	bao.SetFault(nil)
	box.WaitHealthy(instance.Credd)
	box.Until(20*time.Second, "the next credd revokes what the killed one left", func() error {
		if bao.Live() != 0 {
			return errors.New("a lease lives")
		}
		return nil
	})
	box.WaitRecord("its record", func(r *audit.Record) bool {
		return r.Event == audit.EventLeaseRevoked && r.Kid == held.Name && r.Fields["state"] == string(wire.LeaseRevoked)
	})

	box.Spawn(card, hostile(t, box))
	r = box.Tagout("--json", "stop", "--all", "--by", practice.Authority, "--reason", "test")
	lines := strings.Split(strings.TrimSpace(r.Stdout), "\n")
	last := lines[len(lines)-1]
	if r.Code != 0 || !strings.HasPrefix(last, `{"leases":[`) || !strings.Contains(last, `"state":"revoked"`) || bao.Live() != 0 {
		t.Errorf("stopping everything: %d, %d leases are left, %s%s", r.Code, bao.Live(), last, r.Stderr)
	}
}
