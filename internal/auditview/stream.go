package auditview

import (
	"context"

	"tagout/internal/audit"
)

// Stream calls each with every record that is wanted, in the order in which they happened: the daemons' logs, each of which
// is in order, are read beside each other and merged by the boot clock within a boot and by the wall clock between. It
// holds some records of each daemon and no more, however many there are.
func (s Scanner) Stream(ctx context.Context, q Query, each func(*Line) error) (stats Stats, err error) {
	shards, err := s.Shards(q)
	if err != nil {
		return stats, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var logs []*running
	for from := 0; from < len(shards); {
		to := from + 1
		for to < len(shards) && shards[to].Daemon == shards[from].Daemon {
			to++
		}
		logs = append(logs, s.start(ctx, shards[from:to], q))
		from = to
	}
	for _, r := range logs {
		r.next()
	}
	for err == nil {
		var first *running
		for _, r := range logs {
			if r.open && (first == nil || r.head.before(&first.head)) {
				first = r
			}
		}
		if first == nil {
			break
		}
		err = each(&first.head)
		first.next()
	}
	cancel()
	for _, r := range logs {
		for r.open {
			r.next()
		}
		stats.add(r.stats)
		if err == nil {
			err = r.err
		}
	}
	return stats, err
}

// running is one daemon's log while it is read.
type running struct {
	lines chan Line
	head  Line
	open  bool
	stats Stats // once lines is closed
	err   error // likewise
}

func (r *running) next() { r.head, r.open = <-r.lines }

func (s Scanner) start(ctx context.Context, shards []audit.Shard, q Query) *running {
	r := &running{lines: make(chan Line, 256)}
	go func() {
		defer close(r.lines)
		for _, sh := range shards {
			stats, err := s.ScanShard(ctx, sh, 0, q, func(l Line) error {
				select {
				case r.lines <- l:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			})
			r.stats.add(stats)
			if err != nil {
				r.err = err
				return
			}
		}
	}()
	return r
}
