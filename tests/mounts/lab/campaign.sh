#!/usr/bin/env bash
# Everything that the lab can do, for hours: `campaign.sh PYTHON REPORTS [TURNS]`. PYTHON is that of an environment with the
# package and pytest. Each turn draws new random numbers; it goes on after a failure, and fails at the end.
set -uo pipefail
lab=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
python=$1 reports=$2 turns=${3:-1}
failed=()

# run NAME VERSION [nfslab options] -- [pytest arguments]
run() {
  local name=$1 version=$2
  shift 2
  echo "=== $name"
  "$lab/suite" "$python" "$version" "$reports/$name" "$@" || failed+=("$name")
}

mkdir -p "$reports"
for turn in $(seq "$turns"); do
  for version in 4.2 4.1 3; do
    run "$turn-$version" "$version" -- -q -m 'not lab and not torch and not etcd' --timeout=1800
    run "$turn-$version-cuts" "$version" --lease 15 --grace 15 -- -q -m lab --timeout=1800
  done
  run "$turn-4.2-actimeo" 4.2 --opts actimeo=0 -- -q -m 'not lab and not torch and not etcd' --timeout=1800
  run "$turn-4.2-rtt" 4.2 --rtt 1 --timeout 6000 -- -q -m 'not lab and not torch and not etcd' --timeout=3600
  run "$turn-4.2-qemu" 4.2 --engine qemu --timeout 14000 -- -q -m 'not lab and not torch and not etcd' -k 'not soft and not sixty_four' --timeout=3600
  if command -v glusterd >/dev/null; then
    echo "=== $turn-gluster"
    (cd "$lab/../../.." && "$python" "$lab/glab.py" --tuned --timeout 3000 -- "$python" -m pytest tests/mounts \
      -p no:cacheprovider -q --timeout=1800 --shared-dirs /mnt/a,/mnt/b --on-a 'on_host a' --on-b 'on_host b' \
      --store-options coherence=locked -k 'not round_trips') || failed+=("$turn-gluster")
  else
    failed+=("$turn-gluster: no glusterd here, apt-get install glusterfs-server glusterfs-client")
  fi
  if command -v ceph-fuse >/dev/null && command -v ceph-mds >/dev/null; then
    echo "=== $turn-ceph"
    (cd "$lab/../../.." && "$python" "$lab/clab.py" --timeout 3000 -- "$python" -m pytest tests/mounts \
      -p no:cacheprovider -q --timeout=1800 --shared-dirs /mnt/a,/mnt/b --on-a 'on_host a' --on-b 'on_host b' \
      --store-options coherence=direct -k 'not round_trips') || failed+=("$turn-ceph")
  else
    failed+=("$turn-ceph: no CephFS here, apt-get install ceph-mon ceph-osd ceph-mds ceph-fuse ceph-common")
  fi
done
[ ${#failed[@]} -eq 0 ] || printf 'failed: %s\n' "${failed[@]}"
exit $((${#failed[@]} > 0))
