# Fetches the packages of an image and lays out their files in /build/root. Neither a program nor a script of theirs is run.
# usage: fetch.sh KEYRING SUITE PACKAGES SOURCE... ; PACKAGES are separated by commas, a SOURCE is a line of sources.list(5)
set -eu
keyring=$1 suite=$2 packages=$3
shift 3
mkdir /build
export TMPDIR=/build
# Programs and libraries are in /usr alone, as in every Debian since bookworm; a package says so where there is one.
exec mmdebstrap --mode=chrootless --variant=extract --format=directory \
	--skip=check/signed-by,check/qemu,chroot/mount,cleanup --keyring="$keyring" --include='?or(?essential,?name(^usr-is-merged$))' --include="$packages" \
	--aptopt='APT::Sandbox::User "root"' --aptopt='Acquire::EnableSrvRecords "false"' --aptopt='Acquire::Retries "2"' \
	--aptopt='Acquire::http::Timeout "30"' --aptopt='Acquire::https::Timeout "30"' \
	--setup-hook='cd "$1" && for d in bin sbin lib lib64; do mkdir -p usr/$d && ln -s usr/$d $d; done' \
	"$suite" /build/root "$@"
