// Package kids owns the life of kids: spawn, exec, destroy, and what is left of them after a crash.
//
// It promises that a kid's first process starts only when every guard of its session has acknowledged it;
// that a spawn which fails leaves nothing; that a destroyed kid is gone with everything that was made for it,
// in an order in which each moment denies at least as much as the one before; and that a kid whose sandboxd
// died is either adopted as it is or torn down, never repaired: what a stop changed stays changed.
//
// A kid's state changes only as package lifecycle allows.
//
// It does not promise that a stop is noticed at once (killswitchd does the stopping), and it never opens a
// road that its collaborators closed.
package kids
