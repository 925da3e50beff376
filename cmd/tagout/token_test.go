package main

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// TestTokenCommands talk to credd and print what it says, for people and as JSON.
func TestTokenCommands(t *testing.T) {
	now := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	one := wire.TokenInfo{ID: "0123456789ab", Secret: "vendor_api", Kid: "k1", Session: "01S", Card: "practice", Minted: now}
	two := one
	two.ID, two.Expires, two.Left = "ba9876543210", now.Add(time.Hour), time.Hour
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/tokens", func(w http.ResponseWriter, r *http.Request) {
		switch q := r.URL.Query(); {
		case q.Get("id") == one.ID:
			control.Reply(w, []wire.TokenInfo{one})
		case len(q) == 0:
			control.Reply(w, []wire.TokenInfo{one, two})
		default:
			control.Reply(w, []wire.TokenInfo{})
		}
	})
	mux.HandleFunc("POST /v1/tokens/revoke", func(w http.ResponseWriter, r *http.Request) {
		var req wire.TokenRevokeRequest
		if !control.Read(w, r, &req) {
			return
		}
		if req.Kid != "k1" || req.Reason != "lost laptop" {
			control.Refuse(w, http.StatusNotFound, reason.TokenUnknown, "kid "+req.Kid+" has no token now")
			return
		}
		control.Reply(w, wire.TokenRevokeReply{Revoked: []wire.TokenInfo{one, two}})
	})
	serve(t, "tclitok", instance.Credd, mux)
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"token ls", 0, "0123456789ab  vendor_api  k1   practice  2026-07-01T12:00:00Z  with its session\nba9876543210  vendor_api  k1   practice  2026-07-01T12:00:00Z  1h0m0s\n"},
		{"token ls --kid nobody", 0, "ID  SECRET  KID  CARD  MINTED  EXPIRES IN\n"},
		{"token ls --json --secret none", 0, "[]\n"},
		{"token show 0123456789ab", 0, "expires  with its session\n"},
		{"token show ffffffffffff", 1, "token ffffffffffff is not accepted now"},
		{"token show 0123456789ab --json", 0, `"id": "0123456789ab"`},
		{"token revoke --kid k1 --reason lost_laptop", 0, "token ba9876543210 of kid k1 for vendor_api is revoked\n"},
		{"token revoke --kid k9", 2, "kid k9 has no token now"},
	} {
		args := strings.Fields("--instance tclitok " + c.args)
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "lost_laptop", "lost laptop")
		}
		code, out, errOut := tagout(args...)
		if code != c.code || !strings.Contains(out+errOut, c.want) {
			t.Errorf("%s: %d %q %q, want %d and %q", c.args, code, out, errOut, c.code, c.want)
		}
	}
}
