package api

import (
	"context"
	"fmt"
	"net/http"
	"slices"

	"tagout/internal/apikey"
	"tagout/internal/control"
	"tagout/internal/reason"
)

// Role is what a caller may do.
type Role = apikey.Role

// Roles that routes name.
const (
	RoleRead    = apikey.RoleRead
	RoleSpawn   = apikey.RoleSpawn
	RoleExec    = apikey.RoleExec
	RoleFiles   = apikey.RoleFiles
	RoleDestroy = apikey.RoleDestroy
	RoleGrant   = apikey.RoleGrant
	RoleImages  = apikey.RoleImages
)

// RoleAny is held by whoever holds any role.
const RoleAny Role = ""

// Roles lists all roles.
func Roles() []Role { return apikey.Roles() }

// Caller is who asks.
type Caller struct {
	Name  string // for records: "uid:0", "key:ci", "cert:ci.example.com"
	Roles []Role
	Local bool   // came over the unix socket: may have the machine's own files put into a kid
	Agent string // what an AI agent calls its client; empty: no agent asks. Agents never hold RoleGrant and RoleImages
	// Counts says why the caller may do nothing more, for what outlasts a call: a key that was removed, say. May be nil.
	Counts func() error
}

// May says whether the caller holds the role.
func (c Caller) May(r Role) bool {
	if r == RoleAny {
		return len(c.Roles) > 0
	}
	return slices.Contains(c.Roles, r) && (c.Agent == "" || forAgents(r))
}

// forAgents says whether an AI agent may hold the role: it opens nothing for a kid, and decides not on what kids run.
func forAgents(r Role) bool { return r != RoleGrant && r != RoleImages }

// actor names the caller in records.
func (c Caller) actor() string {
	if c.Agent != "" {
		return c.Name + " agent:" + c.Agent
	}
	return c.Name
}

type callerKey struct{}

// WithCaller returns a context whose requests are the caller's.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// CallerOf returns who asks; a caller without roles where nobody said.
func CallerOf(ctx context.Context) Caller {
	c, _ := ctx.Value(callerKey{}).(Caller)
	return c
}

// actor names who asks, for records.
func actor(ctx context.Context) string { return CallerOf(ctx).actor() }

// AgentHeader is with what a client says that an AI agent asks through it, and which. It can only take rights away.
const AgentHeader = "Tagout-Agent"

// maxAgent bounds an agent's name.
const maxAgent = 64

// AgentOf returns the agent that the request names, in printable ASCII.
func AgentOf(r *http.Request) string {
	name := []byte(r.Header.Get(AgentHeader))
	for i, b := range name {
		if b <= ' ' || b > '~' {
			name[i] = '_'
		}
	}
	return string(name[:min(len(name), maxAgent)])
}

// fromRoot lets root through, as the kernel saw it (SO_PEERCRED), and nobody else.
func fromRoot(h http.Handler) http.HandlerFunc {
	return control.Admit(func(w http.ResponseWriter, r *http.Request) {
		peer, _ := control.PeerOf(r.Context()) // Admit lets nobody in who is not known
		c := Caller{Name: fmt.Sprintf("uid:%d", peer.UID), Roles: Roles(), Local: true, Agent: AgentOf(r)}
		h.ServeHTTP(w, r.WithContext(WithCaller(r.Context(), c)))
	}, 0)
}

// refuseRole says that the caller lacks the role.
func refuseRole(w http.ResponseWriter, c Caller, role Role) {
	detail := fmt.Sprintf("%s does not hold the role %s", c.Name, role)
	switch {
	case c.Agent != "" && role == RoleGrant:
		detail = "an AI agent can open nothing for a kid: a person of the box's authority list has to"
	case c.Agent != "" && role == RoleImages:
		detail = "an AI agent can neither add nor remove images: a person has to"
	}
	control.Refuse(w, http.StatusForbidden, reason.RoleMissing, detail)
}
