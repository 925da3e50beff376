package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/instance"
	"tagout/internal/wire"
)

// status is what `tagout status --json` prints.
type status struct {
	Instance string                     `json:"instance"`
	Daemons  map[string]daemonStatus    `json:"daemons"`
	Layers   map[wire.Layer]layerStatus `json:"layers"`
	Tags     []wire.Tag                 `json:"tags"`
	Kids     int                        `json:"kids"`                 // -1: sandboxd does not say
	States   map[wire.KidState]int      `json:"kid_states,omitempty"` // how many of them are in each
	OnHost   []wire.Kid                 `json:"on_host_network"`      // kids among them that live on the machine's network
}

type daemonStatus struct {
	Healthy bool   `json:"healthy"`
	Detail  string `json:"detail,omitempty"` // why not, or what is wrong all the same
}

type layerStatus = wire.LayerStatus

// healthLimit bounds one daemon's health check.
const healthLimit = 3 * time.Second

func (a *app) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show the daemons' health, whether each stop layer is known to work now, tags and kids",
		Long: `Show the daemons' health, one lamp for each stop layer, how many kids there are and how many
tags hang. A lamp is ARMED while the layer could fire now, and the last time that killswitchd
stopped a canary kid by it, not long ago, it did what it must; DEGRADED, with the reason, where
that is not so; and STOPPED, with the tags, while tags demand the layer. The exit code is about
the daemons' health alone. ` + "`tagout prove`" + ` makes a proof now.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, err := a.open(); err != nil {
				return err
			}
			s, err := a.status(cmd)
			if a.json {
				return errors.Join(a.printJSON(s), err)
			}
			a.printStatus(s)
			return err
		},
	}
}

// status asks all daemons. The error names those that are not healthy, and those are not asked for more: one
// that hangs costs healthLimit and no more.
func (a *app) status(cmd *cobra.Command) (status, error) {
	s := status{Instance: a.instance, Daemons: a.health(cmd.Context()), Layers: map[wire.Layer]layerStatus{}, Tags: []wire.Tag{}, Kids: -1, OnHost: []wire.Kid{}}
	for _, l := range wire.AllLayers() {
		s.Layers[l] = layerStatus{State: wire.LampDegraded, Detail: "killswitchd does not say"}
	}
	ask := func(daemon, route string, out any) bool {
		ctx, cancel := context.WithTimeout(cmd.Context(), healthLimit)
		defer cancel()
		return s.Daemons[daemon].Healthy && a.callWith(ctx, daemon, http.MethodGet, route, nil, out) == nil
	}
	var kill wire.KillStatus
	if ask(instance.Killswitchd, "/v1/status", &kill) {
		s.Layers, s.Tags = kill.Layers, append(s.Tags, kill.Tags...)
	}
	var kids []wire.Kid
	if ask(instance.Sandboxd, "/v1/kids", &kids) {
		s.Kids, s.States, s.OnHost = len(kids), map[wire.KidState]int{}, onHost(kids)
		for _, k := range kids {
			s.States[k.State]++
		}
	}
	var sick []string
	for _, d := range instance.Daemons() {
		if !s.Daemons[d].Healthy {
			sick = append(sick, d)
		}
	}
	if len(sick) > 0 {
		return s, &coded{exitUnreachable, fmt.Errorf("not healthy: %s", strings.Join(sick, ", "))}
	}
	return s, nil
}

// health asks all daemons at the same time.
func (a *app) health(ctx context.Context) map[string]daemonStatus {
	ctx, cancel := context.WithTimeout(ctx, healthLimit)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	out := map[string]daemonStatus{}
	for _, d := range instance.Daemons() {
		wg.Go(func() {
			var health wire.Health
			err := a.callWith(ctx, d, http.MethodGet, "/healthz", nil, &health)
			st := daemonStatus{Healthy: err == nil, Detail: health.Warning}
			if err != nil {
				st.Detail = err.Error()
			}
			mu.Lock()
			defer mu.Unlock()
			out[d] = st
		})
	}
	wg.Wait()
	return out
}

func (a *app) printStatus(s status) {
	for _, d := range instance.Daemons() {
		word := "healthy"
		switch detail := s.Daemons[d].Detail; {
		case !s.Daemons[d].Healthy:
			word = "NOT HEALTHY: " + detail
		case detail != "":
			word = "healthy, but " + detail
		}
		a.printf("%-12s %s\n", d, word)
	}
	for _, l := range wire.AllLayers() {
		a.printf("%-12s %s\n", l, lampText(l, s.Layers[l], s.Tags))
	}
	if len(s.OnHost) > 0 {
		a.printf("%-12s %s\n", "host network", hostText(s.OnHost))
	}
	kids, tags := "kids are not known", "tags are not known"
	if s.Kids >= 0 {
		kids = count(s.Kids, "kid") + states(s.States)
	}
	if s.Daemons[instance.Killswitchd].Healthy {
		tags = count(len(s.Tags), "tag")
	}
	a.printf("%s, %s\n", kids, tags)
}

// states says in which states kids are, where that is not running.
func states(n map[wire.KidState]int) string {
	var out []string
	for _, state := range slices.Sorted(maps.Keys(n)) {
		if state != wire.KidRunning {
			out = append(out, fmt.Sprintf("%d %s", n[state], state))
		}
	}
	if len(out) == 0 {
		return ""
	}
	return " (" + strings.Join(out, ", ") + ")"
}
