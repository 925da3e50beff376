// Package network makes a kid's network: a network namespace of its own, pinned to a file so that it outlives
// every process, and one veth pair that leads to the host. Everything is netlink; no program is called.
//
// The namespace belongs to a user namespace made with it, the one that the kid's processes live in. No
// process in there ever has a capability, so nobody inside can change the network; but runc 1.1 can only
// enter a network namespace for a second process when it owns it.
//
// The package decides nothing about traffic: a namespace that it made and that no BPF entry knows reaches
// nothing.
package network
