package auditview

import (
	"container/heap"
	"context"
)

// Newest returns the newest records that are wanted, at most limit (0: all), in the order in which they happened, and how
// many older ones there are. No more than limit are held in memory.
func Newest(ctx context.Context, f Finder, q Query, limit int) (lines []Line, older int, stats Stats, err error) {
	h := &byTime{}
	stats, err = f.Find(ctx, q, func(l Line) error {
		heap.Push(h, l)
		if limit > 0 && h.Len() > limit {
			heap.Pop(h)
			older++
		}
		return nil
	})
	if err != nil {
		return nil, 0, stats, err
	}
	Order(*h)
	return *h, older, stats, nil
}

// byTime is a heap with the oldest record on top.
type byTime []Line

func (h byTime) Len() int           { return len(h) }
func (h byTime) Less(i, j int) bool { return h[i].before(&h[j]) }
func (h byTime) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *byTime) Push(v any)        { *h = append(*h, v.(Line)) }
func (h *byTime) Pop() any {
	old := *h
	last := old[len(old)-1]
	old[len(old)-1] = Line{}
	*h = old[:len(old)-1]
	return last
}

// before compares by the boot clock within a boot and by the wall clock between.
func (l *Line) before(o *Line) bool {
	if l.BootID == o.BootID && l.Boot != o.Boot {
		return l.Boot < o.Boot
	}
	if !l.Time.Equal(o.Time) {
		return l.Time.Before(o.Time)
	}
	return l.ID < o.ID
}
