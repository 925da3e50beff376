package main

// Sweep forgets what belongs to no kid that is kept.
func (k *kernel) Sweep(keep func(mark uint32) bool) error { return k.maps.Sweep(keep) }
