package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
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
	Kids     int                        `json:"kids"` // -1: sandboxd does not say
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
		Short: "Show the daemons' health, whether each stop layer could fire now, tags and kids",
		Args:  cobra.NoArgs,
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

// status asks all daemons. The error names those that are not healthy.
func (a *app) status(cmd *cobra.Command) (status, error) {
	s := status{Instance: a.instance, Daemons: map[string]daemonStatus{}, Layers: map[wire.Layer]layerStatus{}, Tags: []wire.Tag{}}
	var sick error
	for _, d := range instance.Daemons() {
		ctx, cancel := context.WithTimeout(cmd.Context(), healthLimit)
		var health wire.Health
		err := a.callWith(ctx, d, http.MethodGet, "/healthz", nil, &health)
		cancel()
		s.Daemons[d] = daemonStatus{Healthy: err == nil, Detail: health.Warning}
		if err != nil {
			s.Daemons[d] = daemonStatus{Detail: err.Error()}
			sick = errors.Join(sick, errors.New(d))
		}
	}
	if sick != nil {
		sick = &coded{exitUnreachable, fmt.Errorf("not healthy: %s", strings.ReplaceAll(sick.Error(), "\n", ", "))}
	}
	var kill wire.KillStatus
	if err := a.call(cmd, instance.Killswitchd, http.MethodGet, "/v1/status", nil, &kill); err == nil {
		s.Layers, s.Tags = kill.Layers, append(s.Tags, kill.Tags...)
	} else {
		for _, l := range wire.AllLayers() {
			s.Layers[l] = layerStatus{Detail: "killswitchd does not say"}
		}
	}
	s.Kids = -1
	var kids []wire.Kid
	if err := a.call(cmd, instance.Sandboxd, http.MethodGet, "/v1/kids", nil, &kids); err == nil {
		s.Kids = len(kids)
	}
	return s, sick
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
		st, known := s.Layers[l]
		word := "armed"
		if !known || !st.Armed {
			word = "NOT ARMED: " + st.Detail
		}
		a.printf("%-12s %s\n", l, word)
	}
	kids, tags := "kids are not known", "tags are not known"
	if s.Kids >= 0 {
		kids = count(s.Kids, "kid")
	}
	if s.Daemons[instance.Killswitchd].Healthy {
		tags = count(len(s.Tags), "tag")
	}
	a.printf("%s, %s\n", kids, tags)
}
