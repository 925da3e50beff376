#!/bin/bash
# Installs what Tagout needs on a Debian machine, and nothing that is there already.
# usage: setup.sh [test|generate]
set -euo pipefail

need=()
want() { command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || need+=("$2"); }

want runc runc
want iptables iptables
case "${1:-}" in
"") ;;
test) ;;
generate)
	want clang clang
	want llvm-strip llvm
	[ -e /usr/include/bpf/bpf_helpers.h ] || need+=(libbpf-dev)
	;;
*)
	echo "usage: setup.sh [test|generate]" >&2
	exit 2
	;;
esac

if ! command -v go >/dev/null 2>&1; then
	echo "setup: Go is missing: install Go 1.26 or newer (https://go.dev/dl) and put it on PATH" >&2
	exit 1
fi
if [ ${#need[@]} -eq 0 ]; then
	exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
	echo "setup: run as root, or install these packages first: ${need[*]}" >&2
	exit 1
fi
if ! command -v apt-get >/dev/null 2>&1; then
	echo "setup: this is no Debian machine: install these yourself, then run again: ${need[*]}" >&2
	exit 1
fi
echo "setup: installing ${need[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${need[@]}" >/dev/null
