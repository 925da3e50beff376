// Package sandboxd puts the daemon together: kids, their API, the record of the kernel's denials and the
// alerts. It holds no logic of its own but how a card becomes a plan and how the other daemons are asked.
// The BPF maps are handed in, because only mains know them.
package sandboxd
