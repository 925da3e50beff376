/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The BPF target has no architecture of its own: the generic types are the right ones on all of them. */
#include <asm-generic/types.h>
