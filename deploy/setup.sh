#!/bin/bash
# Installs what Tagout needs on a Debian machine, and nothing that is there already.
# usage: setup.sh [test|openbao|generate|bench|bench-stop|bench-credentials]
#   bench-credentials adds redis-server, which `make bench-credentials` measures beside Tagout.
#   bench-stop adds docker.io and podman, which `make bench-stop` and `make bench-kids` measure beside Tagout.
#   bench also puts the peers that `make bench-egress` measures beside Tagout into build/peers.
set -euo pipefail

need=()
want() { command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || need+=("$2"); }

want runc runc
want iptables iptables
want mmdebstrap mmdebstrap # `tagout image build` alone needs it
case "${1:-}" in
"") ;;
test)
	want prometheus-alertmanager prometheus-alertmanager # alerts are tested against it
	want rsyslogd rsyslog                                # the audit log is measured beside it
	# The clients that kids are tested with; busybox has openssl speak TLS.
	want gpg gnupg # signs the practice archive
	for client in curl wget busybox openssl git python3 npm iodine; do
		want "$client" "$client"
	done
	want node nodejs
	want systemd-creds systemd # keeps the key of a sealed vault
	want swtpm swtpm           # a TPM for it to be kept by; tpm2-tools for the libraries that systemd loads
	case "$(/sbin/ldconfig -p)" in
	*libtss2-tcti-swtpm*) ;;
	*) need+=(libtss2-tcti-swtpm0 tpm2-tools) ;;
	esac
	;;
openbao)
	want redis-server redis-server # its users are what is leased
	;;
generate)
	want clang clang
	want llvm-strip llvm
	[ -e /usr/include/bpf/bpf_helpers.h ] || need+=(libbpf-dev)
	;;
bench)
	[ -x /usr/lib/squid/security_file_certgen ] || need+=(squid-openssl)
	want tinyproxy tinyproxy-bin
	want dnsmasq dnsmasq-base
	;;
bench-audit)
	want rsyslogd rsyslog
	;;
bench-stop)
	[ -x /usr/bin/docker ] && [ -x /usr/sbin/dockerd ] || need+=(docker.io)
	[ -x /usr/bin/podman ] || need+=(podman)
	want unshare util-linux
	;;
bench-credentials)
	want redis-server redis-server
	;;
*)
	echo "usage: setup.sh [test|generate|bench|bench-stop|bench-credentials]" >&2
	exit 2
	;;
esac

if ! command -v go >/dev/null 2>&1; then
	echo "setup: Go is missing: install Go 1.26 or newer (https://go.dev/dl) and put it on PATH" >&2
	exit 1
fi

# Peers that come through Go's module proxy, in the versions that the figures are about.
peers() {
	local dir
	dir="$(cd "$(dirname "$0")/.." && pwd)/build/peers"
	mkdir -p "$dir"
	[ -x "$dir/smokescreen" ] || { echo "setup: building smokescreen" && GOBIN="$dir" GOFLAGS= CGO_ENABLED=0 go install github.com/stripe/smokescreen@v0.1.0; }
	[ -x "$dir/coredns" ] || { echo "setup: building coredns (some minutes, once)" && GOBIN="$dir" GOFLAGS= CGO_ENABLED=0 go install github.com/coredns/coredns@v1.12.4; }
}
if [ "${1:-}" = bench ]; then
	peers
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
if [ ! -e /usr/sbin/policy-rc.d ]; then
	# A package must not start its service here: tests and benches run the programs themselves.
	printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
	chmod 755 /usr/sbin/policy-rc.d
	trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${need[@]}" >/dev/null
