"""Run a command against MooseFS on this machine: one master and chunk server, and mfsmount at /mnt/a and /mnt/b.

It needs root, and moosefs-master, moosefs-chunkserver and moosefs-client. `room.py` describes the two hosts, what the
command sees, and the exit status.

  mlab.py [options] -c 'shell text'
  mlab.py [options] -- COMMAND [args...]
"""

from __future__ import annotations

import shutil
import sys

import room

CLUSTER = r"""
  ip address add 192.0.2.1/32 dev lo # a chunk server refuses a master on 127.0.0.1
  echo '192.0.2.1 mfsmaster' >>/etc/hosts
  mkdir -p /brick/master /brick/chunks /brick/chunkserver /run/mfs
  cp /var/lib/mfs/metadata.mfs.empty /brick/master/metadata.mfs
  chown -R mfs:mfs /brick
  echo '* / rw,alldirs,maproot=0:0' >/run/mfs/exports
  echo '/brick/chunks' >/run/mfs/disks
  printf '%s\n' 'DATA_PATH = /brick/master' 'EXPORTS_FILENAME = /run/mfs/exports' 'WORKING_USER = mfs' >/run/mfs/master
  printf '%s\n' 'DATA_PATH = /brick/chunkserver' 'HDD_CONF_FILENAME = /run/mfs/disks' 'MASTER_HOST = mfsmaster' \
    'WORKING_USER = mfs' >/run/mfs/chunkserver
  mfsmaster -c /run/mfs/master start && mfschunkserver -c /run/mfs/chunkserver start || exit 125
  for _ in $(seq 150); do mfsmount /mnt/a -H mfsmaster -S / @MOUNT@ && break; sleep 0.2; done
  mfsmount /mnt/b -H mfsmaster -S / @MOUNT@ || exit 125
"""


def main(argv: list[str]) -> int:
    given = room.parse(room.argument_parser(__doc__), argv)
    if not shutil.which("mfsmaster") or not shutil.which("mfsmount"):
        print("mlab: apt-get install moosefs-master moosefs-chunkserver moosefs-client first", file=sys.stderr)
        return 125
    return room.run("mlab", "moosefs", CLUSTER, given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
