"""Run a command against a CephFS on this machine: one monitor, OSD and MDS, and ceph-fuse at /mnt/a and /mnt/b.

It needs root, and ceph-mon, ceph-osd, ceph-mds, ceph-fuse and ceph-common. The OSD keeps its data in memory. `room.py`
describes the two hosts, what the command sees, and the exit status.

  clab.py [options] -c 'shell text'
  clab.py [options] -- COMMAND [args...]

``kill -9 $(cat /run/ceph/b.pid)`` ends the client of host b. The server is not told.
"""

from __future__ import annotations

import argparse
import shutil
import sys

import room

FSID = "11111111-2222-3333-4444-555555555555"
OSD = "11111111-2222-3333-4444-666666666666"

CLUSTER = rf"""
  mkdir -p /run/ceph /brick/mon /brick/osd /brick/mds
  cat >/run/ceph/ceph.conf <<'C'
[global]
fsid = {FSID}
mon host = [v2:127.0.0.1:3300,v1:127.0.0.1:6789]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
mon allow pool size one = true
mon data avail crit = 0
mon data = /brick/mon
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 4294967296
osd data = /brick/osd
mds data = /brick/mds
run dir = /run/ceph
keyring = /brick/keyring
log file = /brick/$name.log
[client]
pid file = /run/ceph/$id.pid
@SETTINGS@
C
  export CEPH_CONF=/run/ceph/ceph.conf
  monmaptool --create --addv a '[v2:127.0.0.1:3300,v1:127.0.0.1:6789]' --fsid {FSID} /brick/monmap || exit 125
  ceph-authtool --create-keyring /brick/keyring --gen-key -n mon. --cap mon 'allow *' || exit 125
  ceph-mon --mkfs -i a --monmap /brick/monmap --keyring /brick/keyring && ceph-mon -i a || exit 125
  timeout 60 ceph osd new {OSD} 0 </dev/null && ceph-osd -i 0 --mkfs --osd-uuid {OSD} && ceph-osd -i 0 || exit 125
  timeout 60 ceph osd pool create meta 4 && timeout 60 ceph osd pool create data 4 || exit 125
  timeout 60 ceph fs new fs meta data && ceph-mds -i a || exit 125
  for _ in $(seq 150); do timeout 10 ceph mds stat | grep -q up:active && break; sleep 0.2; done
  ceph-fuse --id a @MOUNT@ /mnt/a && ceph-fuse --id b @MOUNT@ /mnt/b || exit 125
"""


def options(argv: list[str]) -> argparse.Namespace:
    parser = room.argument_parser(__doc__)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="an option of both clients, as in ceph.conf"
    )
    return room.parse(parser, argv)


def main(argv: list[str]) -> int:
    given = options(argv)
    if not shutil.which("ceph-fuse") or not shutil.which("ceph-mds"):
        print("clab: apt-get install ceph-mon ceph-osd ceph-mds ceph-fuse ceph-common first", file=sys.stderr)
        return 125
    return room.run("clab", "cephfs", CLUSTER.replace("@SETTINGS@", "\n".join(given.set)), given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
