// Package killswitch is the watchdog: it fires the three stop layers, hangs tags and keeps enforcing them.
//
// What it promises (docs/threat-model.md, invariants 4, 5, 6 and 9):
//   - A stop needs nobody's cooperation. Sessions die by cgroup.kill, packets by one write to a BPF map,
//     tokens by credd's word or, when credd does not give it in time, by credd's death.
//   - A stop waits for nothing but the kernel: not for sandboxd, the proxy, the audit log, the disk or the one
//     who asked. Everything that can hang is bounded, and has its own goroutine.
//   - Observed is said only of what was seen: an empty cgroup, silent packet counters, an acknowledged
//     revocation. Everything else has another name (wire.State).
//   - Each layer is proven at the start and on schedule: fired for real on a canary kid, over the route that a
//     person's order takes. A lamp shows armed only after that.
//   - A tag survives a restart, and what it covers is stopped again for as long as it hangs. Releasing a tag
//     restarts nothing and re-activates no session.
//
// What it does not promise: that a process in uninterruptible sleep dies before its cause clears (it is
// reported as contained, not dead, with pid and state), and that a socket is destroyed on a kernel without
// CONFIG_INET_DIAG_DESTROY (its packets are dropped all the same).
//
// All times are counted on CLOCK_MONOTONIC from the moment at which the first byte of an order was read, and
// compared with packet times on CLOCK_BOOTTIME. The wall clock is used for people only.
//
// The package imports little (imports_test.go holds the list) and knows no file format but JSON.
package killswitch
