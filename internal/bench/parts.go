package bench

import (
	"context"
	"fmt"
	"io"
)

// part is one piece of a benchmark.
type part struct {
	name string // as messages have it
	run  func(context.Context) ([]Metric, error)
}

// measure runs the parts one after the other, writes their figures to NAME.json in dir and prints them. The first part
// that cannot be measured ends it.
func measure(ctx context.Context, out io.Writer, dir, name string, parts []part) (metrics []Metric, err error) {
	for _, p := range parts {
		found, err := p.run(ctx)
		if err != nil {
			return nil, fmt.Errorf("measuring %s: %w", p.name, err)
		}
		metrics = append(metrics, found...)
	}
	if err := Write(dir, name, metrics); err != nil {
		return nil, err
	}
	return metrics, Print(out, metrics)
}
