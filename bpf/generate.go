package bpf

// Needs clang, llvm-strip and libbpf-dev. The result is committed: building Tagout needs none of them.
//go:generate go tool bpf2go -cc clang -strip llvm-strip -target bpfel,bpfeb -go-package bpf -type session_state -type hook -type tagout_reason -type session -type port_key -type reach_key -type proc -type flow_key -type tally -type event -type flood_key -type flood -type layout_info -type exec_event -type exec_count tagout tagout.c -- -O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -Iinclude
