package e2e

import (
	"net/http"
	"testing"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// TestALostAnswerIsAskedForAgain (K12): the same Idempotency-Key is the same kid, also for the sandboxd after the one
// that was killed; another body is a conflict.
func TestALostAnswerIsAskedForAgain(t *testing.T) {
	t.Parallel()
	box := start(t)
	req := wire.SpawnRequest{Purpose: t.Name(), Card: bareCard}
	spawn := func(key string, req wire.SpawnRequest) (kid wire.Kid, err error) {
		return kid, box.Client(instance.Sandboxd).With("Idempotency-Key", key).Call(t.Context(), http.MethodPost, "/v1/kids", req, &kid)
	}
	first, err := spawn("k", req)
	if err != nil {
		t.Fatal(err)
	}
	check := func(when string) {
		t.Helper()
		if again, err := spawn("k", req); err != nil || again.Session != first.Session {
			t.Errorf("%s: %+v %v, want session %s", when, again, err, first.Session)
		}
		other := req
		other.Purpose = "another"
		if _, err := spawn("k", other); control.Status(err) != http.StatusConflict {
			t.Errorf("%s: the key with another body: %v", when, err)
		}
	}
	check("at once")
	box.Kill9(instance.Sandboxd)
	box.WaitHealthy(instance.Sandboxd)
	check("after kill -9")
	if second, err := spawn("l", req); err != nil || second.Session == first.Session {
		t.Errorf("control, another key: %+v %v", second, err)
	}
	var kids []wire.Kid
	if err := box.Client(instance.Sandboxd).Call(t.Context(), http.MethodGet, "/v1/kids", nil, &kids); err != nil || len(kids) != 2 {
		t.Errorf("%d kids, want 2: %v", len(kids), err)
	}
}
