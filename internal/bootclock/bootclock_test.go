package bootclock

import "testing"

func TestNowNeverGoesBack(t *testing.T) {
	t.Parallel()
	last := Now()
	if last <= 0 {
		t.Fatalf("Now() = %v", last)
	}
	for range 1000 {
		now := Now()
		if now < last {
			t.Fatalf("%v after %v", now, last)
		}
		last = now
	}
}
