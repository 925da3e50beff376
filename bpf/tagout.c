//go:build ignore
// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The programs: calls and packets of the kids' cgroups, packets on the kids' links, packets of the daemons'
 * cgroups; exec.h has what sees the programs that kids start. Each finds out on whose behalf it runs and asks verdict.h.
 */
#include "parse.h"
#include "record.h"
#include "exec.h"

#define DENY 0
#define ALLOW 1
#define TCX_NEXT -1 /* other programs on the link may still drop it */
#define TCX_DROP 2

#define SOCK_STREAM 1
#define SOCK_DGRAM 2

char _license[] SEC("license") = "Dual BSD/GPL";

__inline_always void find_session(struct who *w, const __u32 *mark)
{
	if (!mark)
		return;
	w->mark = *mark;
	w->session = bpf_map_lookup_elem(&sessions, mark);
}

__inline_always void who_by_cgroup(struct who *w, __u64 id)
{
	w->cgroup_id = id;
	find_session(w, bpf_map_lookup_elem(&kid_cgroups, &id));
}

/* refuse records a refused call. */
__inline_always int refuse(enum hook hook, enum tagout_reason r, const struct who *w, const struct flow *f,
			   const struct proc *p)
{
	struct tally *c = counters_of(w->mark);

	if (c)
		add(&c->refused, 1);
	tell(c, hook, r, w, f, p);
	return DENY;
}

/* ---- calls ---- */

__inline_always int call(struct bpf_sock_addr *ctx, enum hook hook, struct flow *f)
{
	struct who w = {};
	struct proc p;
	enum tagout_reason r;
	__u64 cookie;

	who_by_cgroup(&w, bpf_get_current_ancestor_cgroup_id(kid_level));
	self(&p);
	f->proto = ctx->protocol > 255 ? 255 : ctx->protocol;
	f->dport = bpf_ntohs((__u16)ctx->user_port);
	if (ctx->sk) {
		f->sport = ctx->sk->src_port;
		if (f->family == AF_INET)
			f->src[0] = ctx->sk->src_ip4;
	}
	if (f->family == AF_INET && !f->src[0] && w.session && !on_host_network(&w))
		f->src[0] = w.session->addr;
	r = flow_verdict(&w, f, UP, 0);
	if (!r && f->proto == IPPROTO_TCP && f->family == AF_INET && !is_own4(&w, f->dst[0]) &&
	    over_pace(w.session, counters_of(w.mark)))
		r = REASON_CONNECT_RATE;
	if (r)
		return refuse(hook, r, &w, f, &p);
	cookie = bpf_get_socket_cookie(ctx);
	bpf_map_update_elem(&sockets, &cookie, &p, BPF_ANY);
	return ALLOW;
}

__inline_always int call4(struct bpf_sock_addr *ctx, enum hook hook)
{
	struct flow f = { .family = AF_INET };

	/* The kernel takes 0.0.0.0 as "this host" (ip_route_output_key_hash_rcu). */
	f.dst[0] = ctx->user_ip4 ? ctx->user_ip4 : bpf_htonl(V4(127, 0, 0, 1));
	return call(ctx, hook, &f);
}

__inline_always int call6(struct bpf_sock_addr *ctx, enum hook hook)
{
	struct flow f = { .family = AF_INET6 };

	f.dst[0] = ctx->user_ip6[0];
	f.dst[1] = ctx->user_ip6[1];
	f.dst[2] = ctx->user_ip6[2];
	f.dst[3] = ctx->user_ip6[3];
	if (!f.dst[0] && !f.dst[1] && f.dst[2] == bpf_htonl(0xffff)) { /* v4-mapped: it is IPv4 on the wire */
		f.family = AF_INET;
		f.dst[0] = f.dst[3] ? f.dst[3] : bpf_htonl(V4(127, 0, 0, 1));
		f.dst[2] = f.dst[3] = 0;
	} else if (!f.dst[0] && !f.dst[1] && !f.dst[2] && !f.dst[3]) {
		f.dst[3] = bpf_htonl(1); /* :: is this host */
	}
	return call(ctx, hook, &f);
}

SEC("cgroup/connect4")
int tagout_connect4(struct bpf_sock_addr *ctx)
{
	return call4(ctx, HOOK_CONNECT4);
}

SEC("cgroup/connect6")
int tagout_connect6(struct bpf_sock_addr *ctx)
{
	return call6(ctx, HOOK_CONNECT6);
}

SEC("cgroup/sendmsg4")
int tagout_sendmsg4(struct bpf_sock_addr *ctx)
{
	return call4(ctx, HOOK_SENDMSG4);
}

SEC("cgroup/sendmsg6")
int tagout_sendmsg6(struct bpf_sock_addr *ctx)
{
	return call6(ctx, HOOK_SENDMSG6);
}

SEC("cgroup/sock_create")
int tagout_socket(struct bpf_sock *ctx)
{
	struct flow f = { .family = ctx->family };
	struct who w = {};
	struct proc p;
	__u32 type = ctx->type, proto = ctx->protocol;
	enum tagout_reason r;

	who_by_cgroup(&w, bpf_get_current_ancestor_cgroup_id(kid_level));
	f.proto = proto > 255 ? 255 : proto;
	r = session_verdict(&w);
	if (!r && !((type == SOCK_STREAM && proto == IPPROTO_TCP) || (type == SOCK_DGRAM && proto == IPPROTO_UDP)))
		r = REASON_RAW_SOCKET;
	if (!r && on_host_network(&w)) {
		/* An unbound UDP socket takes a port of the machine's before any hook sees where it sends. */
		if (proto == IPPROTO_UDP)
			r = REASON_UDP_NOT_ALLOWED;
		else
			ctx->mark = w.mark; /* by which a stop finds and destroys it among the machine's own */
	}
	if (!r)
		return ALLOW;
	self(&p);
	return refuse(HOOK_SOCKET, r, &w, &f, &p);
}

/* bind_call keeps a kid on the machine's network from taking the machine's ports. Others' ports are their own. */
__inline_always int bind_call(struct bpf_sock_addr *ctx, enum hook hook, struct flow *f)
{
	struct who w = {};
	struct proc p;
	enum tagout_reason r;

	who_by_cgroup(&w, bpf_get_current_ancestor_cgroup_id(kid_level));
	r = session_verdict(&w);
	if (!r && on_host_network(&w))
		r = REASON_HOST_PORT;
	if (!r)
		return ALLOW;
	self(&p);
	f->proto = ctx->protocol > 255 ? 255 : ctx->protocol;
	f->dport = bpf_ntohs((__u16)ctx->user_port);
	return refuse(hook, r, &w, f, &p);
}

SEC("cgroup/bind4")
int tagout_bind4(struct bpf_sock_addr *ctx)
{
	struct flow f = { .family = AF_INET };

	f.dst[0] = ctx->user_ip4;
	return bind_call(ctx, HOOK_BIND4, &f);
}

SEC("cgroup/bind6")
int tagout_bind6(struct bpf_sock_addr *ctx)
{
	struct flow f = { .family = AF_INET6 };

	f.dst[0] = ctx->user_ip6[0];
	f.dst[1] = ctx->user_ip6[1];
	f.dst[2] = ctx->user_ip6[2];
	f.dst[3] = ctx->user_ip6[3];
	return bind_call(ctx, HOOK_BIND6, &f);
}

/* ---- packets of the kids' sockets ---- */

__inline_always int kid_packet(struct __sk_buff *skb, enum hook hook, enum direction dir)
{
	struct flow f = {};
	struct who w = {};
	struct proc *p = 0;
	struct tally *c;
	enum tagout_reason r;
	__u64 cookie;

	who_by_cgroup(&w, bpf_skb_ancestor_cgroup_id(skb, kid_level));
	parse(skb, skb->protocol, 0, &f);
	r = flow_verdict(&w, &f, dir, 0);
	if (dir == UP) {
		cookie = bpf_get_socket_cookie(skb);
		p = bpf_map_lookup_elem(&sockets, &cookie);
		if (!r)
			note_flow(&f, p);
	}
	c = counters_of(w.mark);
	count_packet(c, POINT_KID, dir, !r, skb->len);
	if (r && dir == UP)
		tell(c, hook, r, &w, &f, p);
	return r ? DENY : ALLOW;
}

SEC("cgroup_skb/egress")
int tagout_kid_up(struct __sk_buff *skb)
{
	return kid_packet(skb, HOOK_KID_EGRESS, UP);
}

SEC("cgroup_skb/ingress")
int tagout_kid_down(struct __sk_buff *skb)
{
	return kid_packet(skb, HOOK_KID_INGRESS, DOWN);
}

/* ---- packets on the kids' links ---- */

/* arp_verdict lets an active kid resolve its gateway, and claim no address but its own. */
__inline_always enum tagout_reason arp_verdict(struct __sk_buff *skb, const struct who *w, enum direction dir)
{
	enum tagout_reason r = session_verdict(w);
	struct arp4 arp;
	__be32 sender;

	if (r)
		return r;
	if (bpf_skb_load_bytes(skb, ETH_HLEN, &arp, sizeof(arp)) || arp.plen != 4)
		return REASON_MALFORMED;
	__builtin_memcpy(&sender, arp.spa, 4);
	if (dir == UP && sender && sender != w->session->addr)
		return REASON_SPOOFED_SOURCE;
	return REASON_OK;
}

__inline_always int link_packet(struct __sk_buff *skb, enum hook hook, enum direction dir)
{
	struct flow f = {};
	struct who w = { .ifindex = skb->ifindex };
	struct tally *c;
	enum tagout_reason r;
	__be16 type = 0;
	__u32 ifindex = skb->ifindex;

	find_session(&w, bpf_map_lookup_elem(&kid_links, &ifindex));
	if (bpf_skb_load_bytes(skb, offsetof(struct ethhdr, h_proto), &type, sizeof(type)))
		f.problem = REASON_MALFORMED;
	if (skb->vlan_present)
		f.problem = REASON_IP_PROTOCOL;
	if (!f.problem && type == bpf_htons(ETH_P_ARP)) {
		r = arp_verdict(skb, &w, dir);
		f.quiet = r != REASON_SPOOFED_SOURCE; /* the kernel's own retries */
		if (!r)
			return TCX_NEXT;
	} else {
		if (!f.problem)
			parse(skb, type, ETH_HLEN, &f);
		r = flow_verdict(&w, &f, dir, 1);
	}
	c = counters_of(w.mark);
	count_packet(c, POINT_LINK, dir, !r, skb->len > ETH_HLEN ? skb->len - ETH_HLEN : 0);
	if (r && dir == UP)
		tell(c, hook, r, &w, &f, flow_owner(&f));
	return r ? TCX_DROP : TCX_NEXT;
}

SEC("tcx/ingress")
int tagout_link_up(struct __sk_buff *skb)
{
	return link_packet(skb, HOOK_LINK_UP, UP);
}

SEC("tcx/egress")
int tagout_link_dn(struct __sk_buff *skb)
{
	return link_packet(skb, HOOK_LINK_DOWN, DOWN);
}

/* ---- packets of the daemons ---- */

/* unmarked_verdict: a daemon's unmarked sockets talk to kids and to the box itself, nowhere else. */
__inline_always enum tagout_reason unmarked_verdict(const struct flow *f, const __u32 *remote)
{
	__u32 zero = 0, a = bpf_ntohl(remote[0]);
	__u32 *all;

	if (f->family == AF_INET6)
		return is_loopback6(remote) ? REASON_OK : REASON_UNKNOWN_SESSION;
	if (is_loopback4(a))
		return REASON_OK;
	if (!in_kid_net(a))
		return REASON_UNKNOWN_SESSION;
	all = bpf_map_lookup_elem(&stop_all, &zero);
	return !all || *all ? REASON_STOPPED : REASON_OK;
}

/*
 * marked_verdict: a session's own traffic. The metadata check backs the proxy's; resolvers may live there. A secret
 * that the proxy took before the session's tokens were revoked must not go out afterwards, whoever is slow or hangs.
 */
__inline_always enum tagout_reason marked_verdict(const struct who *w, const struct flow *f, enum direction dir,
						  int secret)
{
	enum tagout_reason r = session_verdict(w);
	__u32 mark = w->mark;

	if (!r && secret && bpf_map_lookup_elem(&revoked, &mark))
		return REASON_STOPPED;
	if (r || dir == DOWN || f->dport == PORT_DNS)
		return r;
	if (f->family == AF_INET6 ? is_metadata6(f->dst) : is_metadata4(bpf_ntohl(f->dst[0])))
		return REASON_METADATA_ADDRESS;
	return REASON_OK;
}

__inline_always int daemon_packet(struct __sk_buff *skb, enum hook hook, enum direction dir)
{
	struct bpf_sock *sk = skb->sk ? bpf_sk_fullsock(skb->sk) : 0;
	struct flow f = {};
	struct who w = {};
	struct tally *c;
	enum tagout_reason r;
	int secret = 0;

	parse(skb, skb->protocol, 0, &f);
	if (sk) {
		__u32 mark = sk->mark;

		secret = !!(mark & MARK_SECRET);
		mark &= ~MARK_SECRET;
		if (mark)
			find_session(&w, &mark);
	}
	if (!sk)
		r = REASON_UNKNOWN_SESSION;
	else if (!w.mark)
		r = unmarked_verdict(&f, dir == UP ? f.dst : f.src);
	else if (w.mark == box_mark)
		r = REASON_OK;
	else
		r = marked_verdict(&w, &f, dir, secret);
	if (!r && !w.mark) {
		if (dir == DOWN)
			note_translated(&f);
		return ALLOW; /* kid-side traffic is counted where the kid is */
	}
	c = counters_of(w.mark);
	count_packet(c, POINT_UPSTREAM, dir, !r, skb->len);
	if (c && !r && secret && dir == UP)
		c->last_secret = bpf_ktime_get_boot_ns();
	if (r && dir == UP)
		tell(c, hook, r, &w, &f, 0);
	return r ? DENY : ALLOW;
}

SEC("cgroup_skb/egress")
int tagout_dmn_up(struct __sk_buff *skb)
{
	return daemon_packet(skb, HOOK_DAEMON_EGRESS, UP);
}

SEC("cgroup_skb/ingress")
int tagout_dmn_down(struct __sk_buff *skb)
{
	return daemon_packet(skb, HOOK_DAEMON_INGRESS, DOWN);
}
