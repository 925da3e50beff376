/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Reading packets. Whatever is cut short or out of shape sets flow.problem; nothing is guessed. */
#ifndef TAGOUT_PARSE_H
#define TAGOUT_PARSE_H

#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include "verdict.h"

struct arp4 { /* RFC 826 for IPv4 over Ethernet */
	__be16 htype, ptype;
	__u8 hlen, plen;
	__be16 op;
	__u8 sha[6];
	__u8 spa[4];
	__u8 tha[6];
	__u8 tpa[4];
} __attribute__((packed));

#define IP_FRAGMENT 0x3fff /* more-fragments flag and offset */
#define TCP_SEQ 4
#define TCP_FLAGS 13
#define TCP_SYN 0x02
#define TCP_ACK 0x10

/* parse_ports reads ports and TCP flags of a TCP or UDP header at off. */
__inline_always int parse_ports(struct __sk_buff *skb, __u32 off, struct flow *f)
{
	__be16 p[2];
	__u8 flags;

	if (f->proto != IPPROTO_TCP && f->proto != IPPROTO_UDP)
		return 0;
	if (bpf_skb_load_bytes(skb, off, p, sizeof(p)))
		return -1;
	f->sport = bpf_ntohs(p[0]);
	f->dport = bpf_ntohs(p[1]);
	if (f->proto == IPPROTO_TCP) {
		if (bpf_skb_load_bytes(skb, off + TCP_FLAGS, &flags, 1))
			return -1;
		f->opening = (flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
		if (f->opening && bpf_skb_load_bytes(skb, off + TCP_SEQ, &f->seq, sizeof(f->seq)))
			return -1;
	}
	return 0;
}

__inline_always void parse4(struct __sk_buff *skb, __u32 off, struct flow *f)
{
	struct iphdr ip;

	f->family = AF_INET;
	if (bpf_skb_load_bytes(skb, off, &ip, sizeof(ip))) {
		f->problem = REASON_MALFORMED;
		return;
	}
	f->src[0] = ip.saddr;
	f->dst[0] = ip.daddr;
	f->proto = ip.protocol;
	/* No options: a source route would name another destination than the one judged here. */
	if (ip.version != 4 || ip.ihl != 5) {
		f->problem = REASON_MALFORMED;
		return;
	}
	if (ip.frag_off & bpf_htons(IP_FRAGMENT)) {
		f->problem = REASON_FRAGMENT;
		return;
	}
	if (parse_ports(skb, off + sizeof(ip), f))
		f->problem = REASON_MALFORMED;
}

/* What every Linux link says by itself: router and neighbour discovery, multicast listener reports. */
__inline_always int is_housekeeping6(struct __sk_buff *skb, __u32 off, __u8 proto)
{
	__u8 type;

	if (proto == IPPROTO_HOPOPTS)
		return 1; /* MLD */
	if (proto != IPPROTO_ICMPV6 || bpf_skb_load_bytes(skb, off, &type, 1))
		return 0;
	return (type >= 131 && type <= 136) || type == 143;
}

__inline_always void parse6(struct __sk_buff *skb, __u32 off, struct flow *f)
{
	struct ipv6hdr ip;

	f->family = AF_INET6;
	if (bpf_skb_load_bytes(skb, off, &ip, sizeof(ip)) || ip.version != 6) {
		f->problem = REASON_MALFORMED;
		return;
	}
	__builtin_memcpy(f->src, &ip.saddr, 16);
	__builtin_memcpy(f->dst, &ip.daddr, 16);
	f->proto = ip.nexthdr;
	f->quiet = is_housekeeping6(skb, off + sizeof(ip), f->proto);
	/* Ports only serve the record: IPv6 is refused whatever they are, so headers in between do not matter. */
	(void)parse_ports(skb, off + sizeof(ip), f);
}

/* parse reads the IP packet at off; proto is the frame's type in network order. */
__inline_always void parse(struct __sk_buff *skb, __be16 proto, __u32 off, struct flow *f)
{
	if (proto == bpf_htons(ETH_P_IP))
		parse4(skb, off, f);
	else if (proto == bpf_htons(ETH_P_IPV6))
		parse6(skb, off, f);
	else
		f->problem = REASON_IP_PROTOCOL;
}

#endif
