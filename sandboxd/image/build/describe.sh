# Says which packages were fetched, and what their sources had signed.
set -eu
cd /build/root
for deb in var/cache/apt/archives/*.deb; do
	dpkg-deb -W --showformat='package ${Package} ${Version} ${Architecture}\n' "$deb"
done
cd var/lib/apt/lists
for list in *Release; do
	printf '\nrelease %s\n' "$list"
	cat "$list"
done
