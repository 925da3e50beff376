package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
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
	Kids     int                        `json:"kids"`
}

type daemonStatus struct {
	Healthy bool   `json:"healthy"`
	Detail  string `json:"detail,omitempty"`
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
		err := a.callWith(ctx, d, http.MethodGet, "/healthz", nil, nil)
		cancel()
		s.Daemons[d] = daemonStatus{Healthy: err == nil}
		if err != nil {
			s.Daemons[d] = daemonStatus{Detail: err.Error()}
			sick = &coded{exitUnreachable, fmt.Errorf("%s is not healthy: %w: see its log in /run/tagout/%s/log", d, err, a.instance)}
		}
	}
	var kill wire.KillStatus
	if err := a.call(cmd, instance.Killswitchd, http.MethodGet, "/v1/status", nil, &kill); err == nil {
		s.Layers, s.Tags = kill.Layers, append(s.Tags, kill.Tags...)
	}
	var kids []wire.Kid
	if err := a.call(cmd, instance.Sandboxd, http.MethodGet, "/v1/kids", nil, &kids); err == nil {
		s.Kids = len(kids)
	}
	return s, sick
}

func (a *app) printStatus(s status) {
	for _, d := range instance.Daemons() {
		word := "healthy"
		if !s.Daemons[d].Healthy {
			word = "NOT HEALTHY: " + s.Daemons[d].Detail
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
	a.printf("%d kids, %d tags\n", s.Kids, len(s.Tags))
}
