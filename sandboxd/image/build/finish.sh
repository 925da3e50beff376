# Installs the packages whose files are laid out, in the order in which Debian's own installers do it. It runs in the image.
set -eu
export DEBIAN_FRONTEND=noninteractive DEBCONF_NONINTERACTIVE_SEEN=true LC_ALL=C
cd /var/cache/apt/archives
rm -f /etc/apt/apt.conf.d/00mmdebstrap /etc/apt/apt.conf.d/99mmdebstrap
mkdir -p /usr/sbin /var/lib/dpkg/info /var/lib/dpkg/updates /var/lib/dpkg/triggers /var/lib/dpkg/alternatives
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d # no service is started
chmod 755 /usr/sbin/policy-rc.d
essential=
for deb in base-passwd_*.deb base-files_*.deb; do
	if [ -e "$deb" ]; then dpkg --force-depends --install "$deb"; fi
done
for deb in *.deb; do
	if [ "$(dpkg-deb -f "$deb" Essential)" = yes ] || [ "$(dpkg-deb -f "$deb" Priority)" = required ]; then essential="$essential $deb"; fi
done
if [ -n "$essential" ]; then
	dpkg --force-depends --force-confold --skip-same-version --unpack $essential
	dpkg --force-depends --force-confold --configure -a
fi
dpkg --force-depends --force-confold --skip-same-version --unpack *.deb
dpkg --force-confold --configure -a
bad=$(dpkg --audit)
if [ -n "$bad" ]; then
	echo "not all packages are installed: $bad" >&2
	exit 1
fi
rm -rf /var/cache/apt/archives/*.deb /var/cache/apt/*.bin /var/lib/apt/lists/* /usr/sbin/policy-rc.d /var/lib/dpkg/*-old /var/cache/debconf/*-old
: >/etc/machine-id
