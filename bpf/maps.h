/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The maps, their layouts and the constants. Layouts are an interface: pinned maps outlive the programs, and Go
 * reads them through the types that bpf2go generates. Whoever changes a struct, a key or the meaning of a field
 * raises TAGOUT_LAYOUT: Install refuses to mix layouts.
 */
#ifndef TAGOUT_MAPS_H
#define TAGOUT_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

#define TAGOUT_LAYOUT 8

#ifndef AF_INET
#define AF_INET 2
#define AF_INET6 10
#endif

#define __inline_always static __always_inline

/* Constants of the instance; the loader fills them before the programs are verified. Addresses in host order. */
volatile const __u32 gateway;
volatile const __u32 kid_net;
volatile const __u32 kid_mask;
volatile const __u32 virtual_net;
volatile const __u32 virtual_mask;
volatile const __u32 box_mark;     /* SO_MARK of the daemons' own traffic */
volatile const __u32 kid_level;    /* ancestor level of a kid's own cgroup, root = 0 */
volatile const __u32 event_budget; /* events a session may emit in each 2^30 ns */
volatile const __u8 have_current;  /* cgroup programs may call get_current_pid_tgid, _uid_gid and _comm */

enum session_state {
	STATE_ACTIVE = 1,
	STATE_STOPPED = 2,
};

/*
 * The kid lives in the machine's own network namespace. No address is its own then, loopback included: it reaches
 * what reach names and nothing else.
 */
#define SESSION_HOST_NETWORK 1

struct session {
	__u32 state;
	__be32 addr; /* the kid's own address */
	__u32 open_every; /* ns from one new connection to the next, on average; 0 = as fast as it likes */
	__u32 open_burst; /* connections that may come at once */
	__u32 flags;
};

/* Addresses that a kid on the machine's network may reach by TCP. REACH_FIXED bits go before the address. */
#define REACH_FIXED 64

struct reach_key {
	__u32 bits; /* that count, those of the address included (BPF_MAP_TYPE_LPM_TRIE) */
	__u32 mark;
	__u16 port; /* host order */
	__u16 pad;
	__be32 addr;
};

struct port_key {
	__u32 mark;
	__u16 port; /* host order */
	__u8 proto;
	__u8 pad;
};

/* Who owns a socket. pid is the thread group in the initial pid namespace. */
struct proc {
	__u32 pid;
	__u32 uid;
	char comm[16];
	__u64 boot;
};

struct flow_key {
	__be32 addr; /* the kid's */
	__u16 port;  /* host order */
	__u8 proto;
	__u8 pad;
};

/* A SYN, told apart by what no address translation changes. */
struct syn_key {
	__be32 addr; /* the kid's */
	__be32 seq;
};

enum direction {
	UP = 0,   /* away from the kid */
	DOWN = 1, /* towards the kid */
};

enum point {
	POINT_KID = 0,      /* cgroup_skb on the kids */
	POINT_LINK = 1,     /* tcx on the kid's link */
	POINT_UPSTREAM = 2, /* cgroup_skb on the daemons */
	POINTS = 3,
};

struct traffic {
	__u64 passed_packets[2]; /* by direction; a GSO packet counts once */
	__u64 passed_bytes[2];   /* IP header included */
	__u64 dropped_packets[2];
	__u64 dropped_bytes[2];
	__u64 last_pass; /* CLOCK_BOOTTIME, ns */
};

/* Set in the mark of a socket whose requests carry a secret, beside the session's own mark (session.SecretBit). */
#define MARK_SECRET 16777216

#define REASONS 32

struct tally {
	struct traffic points[POINTS];
	__u64 denied[REASONS]; /* every refused call and every packet dropped on its way up, by reason */
	__u64 refused;         /* connect, sendmsg and socket calls among them */
	__u64 unsaid;          /* denials without an event: over the budget, the ring was full, or housekeeping */
	__u64 window;          /* the budget's current window */
	__u64 emitted;         /* events in it */
	__u64 quiet[REASONS];  /* denials among denied that are housekeeping: nobody's attempt */
	__u64 last_secret;     /* CLOCK_BOOTTIME (ns) of the last packet of a socket that carries a secret which passed upward */
	__u64 next_open;       /* CLOCK_BOOTTIME, ns; see over_pace */
};

/* Denials without an event, by destination: the readable part of a flood. The oldest are forgotten, and only
   their number, which is in tally.denied, remains. */
struct flood_key {
	__u32 dst[4]; /* network order; IPv4 in the first word */
	__u32 mark;
	__u16 dport; /* host order */
	__u8 hook;
	__u8 reason;
	__u8 family;
	__u8 proto;
	__u16 pad;
};

struct flood {
	__u64 count;
	__u32 pid; /* of the first */
	__u32 uid;
	char comm[16];
};

enum hook {
	HOOK_CONNECT4 = 1,
	HOOK_CONNECT6 = 2,
	HOOK_SENDMSG4 = 3,
	HOOK_SENDMSG6 = 4,
	HOOK_SOCKET = 5,
	HOOK_KID_EGRESS = 6,
	HOOK_KID_INGRESS = 7,
	HOOK_LINK_UP = 8,
	HOOK_LINK_DOWN = 9,
	HOOK_DAEMON_EGRESS = 10,
	HOOK_DAEMON_INGRESS = 11,
	HOOK_BIND4 = 12,
	HOOK_BIND6 = 13,
};

struct event {
	__u64 boot; /* CLOCK_BOOTTIME, ns */
	__u64 cgroup_id;
	__u32 mark;
	__u32 pid;
	__u32 uid;
	__u32 ifindex;
	__u32 src[4]; /* network order; IPv4 in the first word */
	__u32 dst[4];
	__u16 sport; /* host order */
	__u16 dport;
	__u8 hook;
	__u8 reason;
	__u8 family;
	__u8 proto;
	char comm[16];
};

struct layout_info {
	__u32 version; /* TAGOUT_LAYOUT of the programs that made the maps; 0 = not yet in use */
};

/* bpf2go finds a type only when something in the object uses it. */
const enum session_state *unused_state __attribute__((unused));
const enum hook *unused_hook __attribute__((unused));
const struct event *unused_event __attribute__((unused));

#define MAP(_name, _type, _key, _value, _max)      \
	struct {                                   \
		__uint(type, BPF_MAP_TYPE_##_type); \
		__uint(max_entries, _max);         \
		__type(key, _key);                 \
		__type(value, _value);             \
	} _name SEC(".maps")

MAP(layout, ARRAY, __u32, struct layout_info, 1);
MAP(stop_all, ARRAY, __u32, __u32, 1);          /* anything but 0 stops the instance */
MAP(sessions, HASH, __u32, struct session, 1024); /* by mark */
MAP(stopped, HASH, __u32, __u64, 1024);         /* mark -> boot time of its stop. A map of its own, so that a
                                                   late write of the session cannot undo a stop. */
MAP(leases, HASH, __u32, __u64, 1024);          /* mark -> CLOCK_BOOTTIME (ns) at which its lease runs out; no entry
                                                   has run out. A map of its own, so that a renewal neither
                                                   undoes a stop nor brings a session back. */
MAP(revoked, HASH, __u32, __u64, 1024);         /* mark -> boot time since which its sockets that carry secrets pass
                                                   nothing; the others go on */
MAP(kid_cgroups, HASH, __u64, __u32, 1024);     /* cgroup id -> mark */
MAP(kid_links, HASH, __u32, __u32, 1024);       /* host-side ifindex -> mark */
MAP(ports, HASH, struct port_key, __u8, 16384);

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC); /* the kernel makes no other */
	__type(key, struct reach_key);
	__type(value, __u8);
} reach SEC(".maps");

MAP(counters, HASH, __u32, struct tally, 1024); /* by mark; 0 = nobody's */
MAP(sockets, LRU_HASH, __u64, struct proc, 65536); /* by socket cookie */
MAP(flows, LRU_HASH, struct flow_key, struct proc, 65536);
MAP(syns, LRU_HASH, struct syn_key, struct proc, 16384);
MAP(floods, LRU_HASH, struct flood_key, struct flood, 8192);
MAP(lost, ARRAY, __u32, __u64, 2); /* events that nobody will read: ring full, over budget */

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} events SEC(".maps");

#endif
