package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"tagout/internal/config"
	"tagout/internal/demo"
	"tagout/internal/instance"
)

func (a *app) demoCommand() *cobra.Command {
	var bin, cardDir, report string
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run the main job once: spawn, contain, stop, prove; nothing is left of it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			dir, err := binDir(bin)
			if err != nil {
				return err
			}
			files, err := cards(cardDir)
			if err != nil {
				return err
			}
			name := a.ownName(cmd, "demo")
			if err := mayOwn(name); err != nil {
				return err
			}
			r := &runner{a: a, bin: dir}
			return demo.Run(cmd.Context(), demo.Config{
				Instance: name, BinDir: dir, Cards: files, Out: a.out, Path: report,
				Doctor: showDoctor,
				Setup: func(ctx context.Context, name string, box *config.Box) error {
					_, err := boxes().Setup(ctx, name, box)
					return err
				},
				Up:        r.start,
				Down:      func(context.Context, instance.Instance) error { return r.stop() },
				Cleanup:   func(ctx context.Context, name string) error { return boxes().Cleanup(ctx, name, true) },
				Leftovers: func(_ context.Context, name string) ([]string, error) { return boxes().Leftovers(name, true) },
			})
		},
	}
	cmd.Flags().StringVar(&bin, "bin-dir", "", "directory of the binaries (default: where tagout itself lies)")
	cmd.Flags().StringVar(&cardDir, "card-dir", "", "directory of practice.yaml and drill.yaml (default: those that come with tagout)")
	cmd.Flags().StringVar(&report, "json", "", "write the report to this file as JSON")
	return cmd
}

func showDoctor(ctx context.Context, w io.Writer) error {
	r := diagnose(ctx)
	if _, err := fmt.Fprint(w, r); err != nil {
		return err
	}
	return r.Refusal()
}
