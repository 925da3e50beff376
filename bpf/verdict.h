/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The one verdict. The cgroup hooks and the tcx backstop ask the same functions, so that a kid whose packets no
 * cgroup hook sees (gVisor, a microVM) is held to the same rules. No entry means deny, everywhere.
 */
#ifndef TAGOUT_VERDICT_H
#define TAGOUT_VERDICT_H

#include <linux/in.h>

#include "maps.h"

/* Numbers and words are those of internal/reason; a Go test compares the two lists. */
enum tagout_reason {
	REASON_OK = 0,
	REASON_UNKNOWN_SESSION = 1,
	REASON_STOPPED = 2,
	REASON_LEASE_EXPIRED = 3,
	REASON_RAW_ADDRESS = 4,
	REASON_PORT_NOT_ALLOWED = 5,
	REASON_DNS_BYPASS = 6,
	REASON_DOT = 7,
	REASON_QUIC = 8,
	REASON_UDP_NOT_ALLOWED = 9,
	REASON_METADATA_ADDRESS = 10,
	REASON_IPV6 = 11,
	REASON_RAW_SOCKET = 12,
	REASON_IP_PROTOCOL = 13,
	REASON_FRAGMENT = 14,
	REASON_SPOOFED_SOURCE = 15,
	REASON_HOST_ADDRESS = 16,
	REASON_MULTICAST = 17,
	REASON_MALFORMED = 18,
	REASON_CONNECT_RATE = 19,
	REASON_NOT_IN_REACH = 20,
	REASON_HOST_PORT = 21,
};

const enum tagout_reason *unused_reason __attribute__((unused));

#define PORT_DNS 53 /* also the gateway's resolver */
#define PORT_DOT 853
#define PORT_HTTPS 443
#define PORT_PROXY 3128 /* the gateway's explicit proxy */

#define V4(a, b, c, d) (((__u32)(a) << 24) | ((__u32)(b) << 16) | ((__u32)(c) << 8) | (__u32)(d))

/* One packet or one call, seen from the kid. Addresses in network order, IPv4 in the first word. */
struct flow {
	__u32 src[4], dst[4];
	__u16 sport, dport; /* host order */
	__be32 seq;         /* of a TCP packet that opens */
	__u8 family;
	__u8 proto;
	__u8 opening; /* a TCP SYN without ACK */
	__u8 quiet;   /* link housekeeping of the kernel: dropped and counted, but nobody's attempt */
	enum tagout_reason problem; /* what the parser refused */
};

/* On whose behalf. */
struct who {
	__u32 mark; /* 0 = nobody's */
	struct session *session;
	__u64 cgroup_id;
	__u32 ifindex;
};

/*
 * lease_over says whether the session's lease has run out. killswitchd renews it again and again for as long as it
 * works, so a killswitchd that is dead, frozen or deadlocked closes the network without doing anything.
 */
__inline_always int lease_over(__u32 mark)
{
	__u64 *until = bpf_map_lookup_elem(&leases, &mark);

	return !until || bpf_ktime_get_boot_ns() >= *until;
}

/* session_verdict says whether the session may do anything at all. */
__inline_always enum tagout_reason session_verdict(const struct who *w)
{
	__u32 zero = 0, mark = w->mark;
	__u32 *all;

	if (!mark || !w->session)
		return REASON_UNKNOWN_SESSION;
	all = bpf_map_lookup_elem(&stop_all, &zero);
	if (!all || *all)
		return REASON_STOPPED;
	if (w->session->state != STATE_ACTIVE || bpf_map_lookup_elem(&stopped, &mark))
		return REASON_STOPPED;
	return lease_over(mark) ? REASON_LEASE_EXPIRED : REASON_OK;
}

__inline_always int in_kid_net(__u32 a)
{
	return (a & kid_mask) == kid_net;
}

__inline_always int in_virtual_net(__u32 a)
{
	return (a & virtual_mask) == virtual_net;
}

__inline_always int is_loopback4(__u32 a)
{
	return a >> 24 == 127;
}

/* Clouds' metadata services: link-local as a whole, Alibaba's, Azure's wire server, Oracle's. */
__inline_always int is_metadata4(__u32 a)
{
	return a >> 16 == V4(0, 0, 169, 254) || a == V4(100, 100, 100, 200) || a == V4(168, 63, 129, 16) ||
	       a == V4(192, 0, 0, 192);
}

__inline_always int is_multicast4(__u32 a)
{
	return a >> 28 == 0xe || a == 0xffffffff;
}

__inline_always int port_allowed(__u32 mark, __u8 proto, __u16 port)
{
	struct port_key key = { .mark = mark, .port = port, .proto = proto };

	return bpf_map_lookup_elem(&ports, &key) != 0;
}

__inline_always int on_host_network(const struct who *w)
{
	return w->session && (w->session->flags & SESSION_HOST_NETWORK);
}

/* is_own4 says whether the address is the kid itself. */
__inline_always int is_own4(const struct who *w, __be32 addr)
{
	if (on_host_network(w))
		return 0;
	return is_loopback4(bpf_ntohl(addr)) || addr == w->session->addr;
}

__inline_always int reachable(__u32 mark, __be32 addr, __u16 port)
{
	struct reach_key key = { .bits = REACH_FIXED + 32, .mark = mark, .port = port, .addr = addr };

	return bpf_map_lookup_elem(&reach, &key) != 0;
}

/* host_verdict4 judges the remote end of a flow of a kid that shares the machine's network. */
__inline_always enum tagout_reason host_verdict4(const struct who *w, __be32 remote, __u16 port, __u8 proto)
{
	__u32 a = bpf_ntohl(remote);

	if (is_metadata4(a))
		return REASON_METADATA_ADDRESS;
	if (is_multicast4(a))
		return REASON_MULTICAST;
	if (proto == IPPROTO_UDP)
		return REASON_UDP_NOT_ALLOWED;
	if (proto != IPPROTO_TCP)
		return REASON_IP_PROTOCOL;
	if (a == gateway || in_kid_net(a) || in_virtual_net(a))
		return REASON_HOST_ADDRESS; /* nobody there could tell whose it is */
	return reachable(w->mark, remote, port) ? REASON_OK : REASON_NOT_IN_REACH;
}

/*
 * verdict4 judges the remote end of a flow of an active session. on_link: the flow was seen on the kid's link,
 * where loopback and the kid's own address can only be forged.
 */
__inline_always enum tagout_reason verdict4(const struct who *w, __be32 remote, __u16 port, __u8 proto, int on_link)
{
	__u32 a = bpf_ntohl(remote);
	int tcp = proto == IPPROTO_TCP, udp = proto == IPPROTO_UDP;

	if (on_host_network(w))
		return host_verdict4(w, remote, port, proto);
	if (!on_link && is_own4(w, remote))
		return REASON_OK;
	if (is_metadata4(a))
		return REASON_METADATA_ADDRESS;
	if (is_multicast4(a))
		return REASON_MULTICAST;
	if (!tcp && !udp)
		return REASON_IP_PROTOCOL;
	if (a == gateway && (port == PORT_DNS || (tcp && port == PORT_PROXY)))
		return REASON_OK;
	if (tcp && in_virtual_net(a) && port_allowed(w->mark, IPPROTO_TCP, port))
		return REASON_OK;

	/* Denied from here on; the most telling reason first. */
	if (port == PORT_DNS)
		return REASON_DNS_BYPASS;
	if (port == PORT_DOT)
		return REASON_DOT;
	if (udp && port == PORT_HTTPS)
		return REASON_QUIC;
	if (in_kid_net(a) || is_loopback4(a))
		return REASON_HOST_ADDRESS;
	if (udp)
		return REASON_UDP_NOT_ALLOWED;
	if (in_virtual_net(a))
		return REASON_PORT_NOT_ALLOWED;
	return REASON_RAW_ADDRESS;
}

__inline_always int is_loopback6(const __u32 *a)
{
	return !a[0] && !a[1] && !a[2] && a[3] == bpf_htonl(1);
}

/* fd00:ec2::254 (AWS) and fd20:ce::254 (Google). */
__inline_always int is_metadata6(const __u32 *a)
{
	return (a[0] == bpf_htonl(0xfd000ec2) || a[0] == bpf_htonl(0xfd2000ce)) && !a[1] && !a[2] &&
	       a[3] == bpf_htonl(0x254);
}

__inline_always enum tagout_reason verdict6(const __u32 *remote, int on_link)
{
	if (!on_link && is_loopback6(remote))
		return REASON_OK;
	return is_metadata6(remote) ? REASON_METADATA_ADDRESS : REASON_IPV6;
}

/* flow_verdict judges one flow: the session first, then the packet's shape, then where it goes or comes from. */
__inline_always enum tagout_reason flow_verdict(const struct who *w, const struct flow *f, enum direction dir, int on_link)
{
	const __u32 *remote = dir == UP ? f->dst : f->src;
	const __u32 *local = dir == UP ? f->src : f->dst;
	__u16 port = dir == UP ? f->dport : f->sport;
	enum tagout_reason r;

	r = session_verdict(w);
	if (r)
		return r;
	if (f->problem)
		return f->problem;
	if (f->family == AF_INET6) /* on the machine's network ::1 is not the kid either */
		return verdict6(remote, on_link || on_host_network(w));
	if (on_link && local[0] != w->session->addr)
		return REASON_SPOOFED_SOURCE;
	r = verdict4(w, remote[0], port, f->proto, on_link);
	/* Nobody opens a connection into a kid; what comes back from the gateway answers the kid's own. */
	if (!r && dir == DOWN && f->opening && !(!on_link && is_own4(w, remote[0])))
		return REASON_HOST_ADDRESS;
	return r;
}

#endif
