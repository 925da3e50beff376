package proxy

import "testing"

// After a burst no more than a few descriptors are kept, and in the end none.
func TestSparePipesAreGivenUp(t *testing.T) {
	var held []*pipe
	for range cap(sparePipes) + 5 {
		p := takePipe()
		if p == nil {
			t.Fatal("no pipe")
		}
		held = append(held, p)
	}
	before := openFiles(t)
	for _, p := range held {
		p.giveBack(true)
	}
	if n := len(sparePipes); n > cap(sparePipes) || before-openFiles(t) < 2*5 {
		t.Errorf("%d pipes are kept", n)
	}
	for range 10 {
		dropSpares((len(sparePipes) + 1) / 2)
	}
	if n := len(sparePipes); n != 0 {
		t.Errorf("%d pipes are left", n)
	}
}
