/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Counting and telling. Counters are exact; events are the readable part and may be lost, which is counted too. */
#ifndef TAGOUT_RECORD_H
#define TAGOUT_RECORD_H

#include "verdict.h"

#define LOST_RING 0
#define LOST_BUDGET 1
#define NO_UID 0xffffffff

__inline_always void add(__u64 *n, __u64 by)
{
	__sync_fetch_and_add(n, by);
}

/* counters_of returns the session's counters, or nobody's (mark 0), which Install made. */
__inline_always struct tally *counters_of(__u32 mark)
{
	struct tally *c = bpf_map_lookup_elem(&counters, &mark);
	__u32 nobody = 0;

	return c ? c : bpf_map_lookup_elem(&counters, &nobody);
}

__inline_always void count_packet(struct tally *c, enum point at, enum direction dir, int passed, __u32 bytes)
{
	struct traffic *t;

	if (!c)
		return;
	t = &c->points[at];
	if (passed) {
		add(&t->passed_packets[dir], 1);
		add(&t->passed_bytes[dir], bytes);
		t->last_pass = bpf_ktime_get_boot_ns();
	} else {
		add(&t->dropped_packets[dir], 1);
		add(&t->dropped_bytes[dir], bytes);
	}
}

__inline_always void lose(struct tally *c, __u32 why)
{
	__u64 *n = bpf_map_lookup_elem(&lost, &why);

	if (n)
		add(n, 1);
	if (c)
		add(&c->unsaid, 1);
}

/*
 * over_pace says whether the session opens connections faster than it may (the virtual scheduling algorithm of ITU-T
 * I.371, annex A), and counts this one where not. The proxy has a limit of its own, below this one, whose refusals
 * say why; this one keeps a flood from costing the proxy anything. Races between CPUs only blur it.
 */
__inline_always int over_pace(const struct session *s, struct tally *c)
{
	__u64 every = s->open_every, now, next;

	if (!every || !c)
		return 0;
	now = bpf_ktime_get_boot_ns();
	next = c->next_open > now ? c->next_open : now;
	if (next - now >= every * s->open_burst)
		return 1;
	c->next_open = next + every;
	return 0;
}

/* within_budget keeps one noisy kid from filling the ring for all. Races between CPUs only blur the limit. */
__inline_always int within_budget(struct tally *c, __u64 now)
{
	__u64 window = now >> 30;

	if (!c)
		return 1;
	if (c->window != window) {
		c->window = window;
		c->emitted = 0;
	}
	if (c->emitted >= event_budget)
		return 0;
	add(&c->emitted, 1);
	return 1;
}

/* count_flood keeps the destination of a denial that has no event. p may be null. */
__inline_always void count_flood(enum hook hook, enum tagout_reason reason, const struct who *w,
				 const struct flow *f, const struct proc *p)
{
	struct flood_key key = { .mark = w->mark, .dport = f->dport, .hook = hook, .reason = reason,
				 .family = f->family, .proto = f->proto };
	struct flood first = { .count = 1, .uid = NO_UID };
	struct flood *there;

	__builtin_memcpy(key.dst, f->dst, 16);
	there = bpf_map_lookup_elem(&floods, &key);
	if (!there) {
		if (p) {
			first.pid = p->pid;
			first.uid = p->uid;
			__builtin_memcpy(first.comm, p->comm, sizeof(first.comm));
		}
		if (!bpf_map_update_elem(&floods, &key, &first, BPF_NOEXIST))
			return;
		there = bpf_map_lookup_elem(&floods, &key); /* another CPU was first */
	}
	if (there)
		add(&there->count, 1);
}

/*
 * tell counts one denial and emits its event, unless the packet is mere housekeeping. p may be null. A reader
 * that copies the counters from the front sees quiet never behind denied, and no event before its count.
 */
__inline_always void tell(struct tally *c, enum hook hook, enum tagout_reason reason, const struct who *w,
			  const struct flow *f, const struct proc *p)
{
	__u64 now = bpf_ktime_get_boot_ns();
	struct event *e;

	if (f->quiet && c)
		add(&c->quiet[reason & (REASONS - 1)], 1);
	if (c)
		add(&c->denied[reason & (REASONS - 1)], 1);
	if (f->quiet) {
		if (c)
			add(&c->unsaid, 1);
		return;
	}
	if (!within_budget(c, now)) {
		lose(c, LOST_BUDGET);
		count_flood(hook, reason, w, f, p);
		return;
	}
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e) {
		lose(c, LOST_RING);
		count_flood(hook, reason, w, f, p);
		return;
	}
	__builtin_memset(e, 0, sizeof(*e));
	e->boot = now;
	e->cgroup_id = w->cgroup_id;
	e->mark = w->mark;
	e->ifindex = w->ifindex;
	__builtin_memcpy(e->src, f->src, 16);
	__builtin_memcpy(e->dst, f->dst, 16);
	e->sport = f->sport;
	e->dport = f->dport;
	e->hook = hook;
	e->reason = reason;
	e->family = f->family;
	e->proto = f->proto;
	e->uid = NO_UID;
	if (p) {
		e->pid = p->pid;
		e->uid = p->uid;
		__builtin_memcpy(e->comm, p->comm, sizeof(e->comm));
	}
	bpf_ringbuf_submit(e, 0);
}

/* self fills in the calling process. Only for hooks that run in its context. */
__inline_always void self(struct proc *p)
{
	__builtin_memset(p, 0, sizeof(*p));
	p->uid = NO_UID;
	p->boot = bpf_ktime_get_boot_ns();
	if (have_current) {
		p->pid = bpf_get_current_pid_tgid() >> 32;
		p->uid = (__u32)bpf_get_current_uid_gid();
		bpf_get_current_comm(p->comm, sizeof(p->comm));
	}
}

/* note_flow writes down who opens this flow, under the source port that proxy and dnsfilter will see. */
__inline_always void note_flow(const struct flow *f, const struct proc *p)
{
	struct flow_key key = { .addr = f->src[0], .port = f->sport, .proto = f->proto };
	struct syn_key syn = { .addr = f->src[0], .seq = f->seq };

	if (!p || f->family != AF_INET || (f->proto != IPPROTO_UDP && !f->opening))
		return;
	bpf_map_update_elem(&flows, &key, p, BPF_ANY);
	if (f->opening)
		bpf_map_update_elem(&syns, &syn, p, BPF_ANY);
}

/*
 * note_translated writes the owner down again under the port with which a connection reaches the proxy. Two
 * connections of a kid from one port to two virtual addresses become two to one address: the firewall's DNAT then
 * gives the second another source port. The SYN's sequence number stays.
 */
__inline_always void note_translated(const struct flow *f)
{
	struct flow_key key = { .addr = f->src[0], .port = f->sport, .proto = f->proto };
	struct syn_key syn = { .addr = f->src[0], .seq = f->seq };
	struct proc *p;

	if (!f->opening || f->family != AF_INET)
		return;
	p = bpf_map_lookup_elem(&syns, &syn);
	if (p)
		bpf_map_update_elem(&flows, &key, p, BPF_ANY);
}

__inline_always struct proc *flow_owner(const struct flow *f)
{
	struct flow_key key = { .addr = f->src[0], .port = f->sport, .proto = f->proto };

	return f->family == AF_INET ? bpf_map_lookup_elem(&flows, &key) : 0;
}

#endif
