// Package bpf is the kernel's part of the cordon: programs on the kids' cgroup, on the kids' links and on the
// daemons' cgroups, and the pinned maps through which the daemons tell them what is allowed.
//
// What it promises: a kid reaches the gateway's DNS and proxy and allowed ports of the virtual net, and nothing
// else; a missing entry, a stopped session, an expired lease or a set global flag denies, from the next call or
// packet on, established flows included. The programs are attached to the cgroups and links themselves
// (BPF_PROG_ATTACH), not to a process or a pin: they stay when every daemon has died and when the BPF filesystem
// is unmounted, until the cgroup or link goes or Uninstall takes them off.
//
// What it does not promise: it does not look into packets beyond their headers, it does not know names, and it
// does not see sockets that were made outside the kid's cgroup and passed in. Events are best effort (Lost
// counts the missing ones); Counters are exact.
//
// The C sources are dual-licensed, see LICENSE here.
package bpf
