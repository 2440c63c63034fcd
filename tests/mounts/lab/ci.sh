#!/usr/bin/env bash
# The short part of the shared-mount tests, on NFS 4.2 and 3: `ci.sh PYTHON REPORTS`. It leaves to the long campaign: marker
# files (`soft`), files that are removed under open handles, which a client may take half a minute to notice, whatever
# waits for leases, and the large history.
set -uo pipefail
lab=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
for version in 4.2 3; do
  "$lab/suite" "$1" "$version" "$work/$version" -- -q --durations=8 \
    -k 'not soft and not marker and not removed and not large_history' -m 'not lab and not long and not torch and not etcd' || failed=1
  [ ! -f "$work/$version/junit.xml" ] || { mkdir -p "$2" && cp "$work/$version/junit.xml" "$2/nfs-$version.xml"; }
done
exit $failed
