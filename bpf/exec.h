/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Every program that is started in a kid, as the kernel has it: the arguments are read from the new program's own
 * memory before its first instruction runs, so that neither the program nor its quick end can change them.
 */
#ifndef TAGOUT_EXEC_H
#define TAGOUT_EXEC_H

#include "maps.h"

#define EXEC_NAME 64
#define EXEC_PATH 256
#define EXEC_ARGS 1024

/* What one started program is told as; the record ends after the bytes of args that are there. */
struct exec_event {
	__u64 boot; /* CLOCK_BOOTTIME, ns */
	__u64 cgroup_id;
	__u64 inode;
	__u32 mark;
	__u32 pid;  /* thread group, in the initial pid namespace */
	__u32 ppid; /* of the parent, there too */
	__u32 uid;
	__u32 args_length; /* whole, in bytes; longer than what is here where it was cut */
	__u32 args_here;
	char comm[16];
	char name[EXEC_NAME]; /* of the file that runs: of a script it is the interpreter, of a memfd "memfd:…" */
	char path[EXEC_PATH]; /* as it was given to execve */
	char args[EXEC_ARGS]; /* each ends with a zero byte */
};

/* Exact, whatever is told one by one. */
struct exec_count {
	__u64 started; /* programs */
	__u64 untold;  /* those among them without an event: over the budget, or the ring was full */
	__u64 window;  /* the budget's current window */
	__u64 emitted; /* events in it */
};

const struct exec_event *unused_exec_event __attribute__((unused));

MAP(exec_counts, HASH, __u32, struct exec_count, 1024); /* by mark; made when its first program starts */
MAP(exec_told, HASH, __u32, __u64, 1024); /* by mark: how many of untold a record was written of; sandboxd's */
MAP(exec_scratch, PERCPU_ARRAY, __u32, struct exec_event, 1);

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} execs SEC(".maps");

/* The parts of the kernel's own types that are read; their places are found in its BTF when the program is loaded. */
#define KERNEL __attribute__((preserve_access_index))

struct mm_struct {
	unsigned long arg_start, arg_end;
} KERNEL;

struct task_struct {
	int tgid;
	struct task_struct *real_parent;
	struct mm_struct *mm;
} KERNEL;

struct qstr {
	const unsigned char *name;
} KERNEL;

struct inode {
	unsigned long i_ino;
} KERNEL;

struct dentry {
	struct qstr d_name;
} KERNEL;

struct path {
	struct dentry *dentry;
} KERNEL;

struct file {
	struct path f_path;
	struct inode *f_inode;
} KERNEL;

struct linux_binprm {
	struct file *file;
	const char *filename;
} KERNEL;

__inline_always struct exec_count *exec_count_of(__u32 mark)
{
	struct exec_count *c = bpf_map_lookup_elem(&exec_counts, &mark);
	struct exec_count zero = {};

	if (c)
		return c;
	bpf_map_update_elem(&exec_counts, &mark, &zero, BPF_NOEXIST); /* another CPU may be first */
	return bpf_map_lookup_elem(&exec_counts, &mark);
}

/* exec_within_budget keeps one noisy kid from filling the ring for all. Races between CPUs only blur the limit. */
__inline_always int exec_within_budget(struct exec_count *c, __u64 now)
{
	__u64 window = now >> 30;

	if (c->window != window) {
		c->window = window;
		c->emitted = 0;
	}
	if (c->emitted >= event_budget)
		return 0;
	__sync_fetch_and_add(&c->emitted, 1);
	return 1;
}

/* exec_args copies what the program was started with and returns how many bytes that is. */
__inline_always __u32 exec_args(struct exec_event *e, struct task_struct *task)
{
	struct mm_struct *mm = task->mm;
	unsigned long from, to;
	__u64 n;

	e->args_length = 0;
	if (!mm)
		return 0;
	from = mm->arg_start;
	to = mm->arg_end;
	if (to <= from)
		return 0;
	n = to - from;
	e->args_length = n > 0xffffffff ? 0xffffffff : n;
	asm volatile("" : "+r"(n)); /* or the verifier sees another copy of it bounded */
	if (n > EXEC_ARGS)
		n = EXEC_ARGS;
	return bpf_probe_read_user(e->args, n, (const void *)from) ? 0 : n;
}

SEC("tp_btf/sched_process_exec")
int tagout_exec(__u64 *ctx)
{
	struct task_struct *task = (struct task_struct *)ctx[0];
	struct linux_binprm *bprm = (struct linux_binprm *)ctx[2];
	__u64 id = bpf_get_current_ancestor_cgroup_id(kid_level), now;
	__u32 *mark = bpf_map_lookup_elem(&kid_cgroups, &id), zero = 0;
	struct exec_count *c;
	struct exec_event *e;
	struct file *file;
	__u64 size;

	if (!mark)
		return 0; /* nobody's */
	c = exec_count_of(*mark);
	if (!c)
		return 0;
	__sync_fetch_and_add(&c->started, 1);
	now = bpf_ktime_get_boot_ns();
	e = bpf_map_lookup_elem(&exec_scratch, &zero);
	if (!e || !exec_within_budget(c, now)) {
		__sync_fetch_and_add(&c->untold, 1);
		return 0;
	}
	e->boot = now;
	e->cgroup_id = id;
	e->mark = *mark;
	e->pid = bpf_get_current_pid_tgid() >> 32;
	e->uid = (__u32)bpf_get_current_uid_gid();
	e->ppid = task->real_parent->tgid;
	bpf_get_current_comm(e->comm, sizeof(e->comm));
	e->inode = 0;
	e->name[0] = e->path[0] = 0;
	file = bprm->file;
	if (file) {
		e->inode = file->f_inode->i_ino;
		bpf_probe_read_kernel_str(e->name, sizeof(e->name), file->f_path.dentry->d_name.name);
	}
	bpf_probe_read_kernel_str(e->path, sizeof(e->path), bprm->filename);
	e->args_here = exec_args(e, task);
	size = offsetof(struct exec_event, args) + (e->args_here & (2 * EXEC_ARGS - 1));
	if (size > sizeof(*e))
		size = sizeof(*e);
	if (bpf_ringbuf_output(&execs, e, size, 0))
		__sync_fetch_and_add(&c->untold, 1);
	return 0;
}

#endif
