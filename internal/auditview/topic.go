package auditview

import (
	"fmt"
	"slices"
	"strings"
)

// Topics under which records are shown.
const (
	Network   = "network"
	Files     = "files"
	Tools     = "tools" // calls of tools and of the API, and commands
	Processes = "processes"
	Identity  = "identity"
	Stop      = "stop"
	Life      = "life" // of kids, daemons, the log itself, and everything else
)

// Topics lists them in the order in which they are shown.
func Topics() []string { return []string{Network, Files, Tools, Processes, Identity, Stop, Life} }

// topics says what an event is about, by its name or by the part before the dot.
var topics = map[string]string{
	"dns": Network, "conn": Network, "connect": Network, "http": Network, "policy": Network, "grant": Network, "network": Network, "udp": Network,
	"file": Files, "files": Files, "write": Files, "manifest": Files,
	"tool": Tools, "api": Tools, "exec": Tools, "exec.seen": Processes, "process": Processes, "kid.oom": Processes,
	"token": Identity, "vault": Identity, "secret": Identity, "identity": Identity, "key": Identity, "apikey": Identity, "issuer": Identity, "lease.minted": Identity, "lease.lost": Identity, "lease.revoked": Identity, "lease.revoke-failed": Identity,
	"stop": Stop, "tag": Stop, "trip": Stop, "order": Stop, "lease": Stop, "kid.killed": Stop, "kid.paused": Stop, "kid.resumed": Stop, "proof": Stop, "drill": Stop,
}

// Topic returns what an event is about.
func Topic(event string) string {
	if t, ok := topics[event]; ok {
		return t
	}
	noun, _, _ := strings.Cut(event, ".")
	if t, ok := topics[noun]; ok {
		return t
	}
	return Life
}

// ParseTopics reads a list of topics with commas.
func ParseTopics(list []string) (map[string]bool, error) {
	out := map[string]bool{}
	for _, t := range list {
		t = strings.TrimSpace(t)
		if !slices.Contains(Topics(), t) {
			return nil, fmt.Errorf("%q is nothing that a timeline can be about: use %s", t, strings.Join(Topics(), ", "))
		}
		out[t] = true
	}
	return out, nil
}
