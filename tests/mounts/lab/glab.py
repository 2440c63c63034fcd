"""Run a command against a GlusterFS volume on this machine: one server, and two FUSE clients at /mnt/a and /mnt/b.

It needs root, and glusterfs-server and glusterfs-client. `room.py` describes the two hosts, what the command sees, and
the exit status.

  glab.py [options] -c 'shell text'
  glab.py [options] -- COMMAND [args...]
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys

import room

CACHES = "stat-prefetch quick-read io-cache write-behind read-ahead open-behind readdir-ahead".split()
TUNED = [f"performance.{name}=off" for name in CACHES]
"""Without these a client's view is up to a second old, under a lock too."""
EVENT_THREADS = "client.event-threads=16"
"""With the two threads of the default a mount hangs once two of its processes are killed while they wait for a lock
(https://github.com/gluster/glusterfs/issues/4371). The tests kill up to four at once.
"""
TUNED_MOUNT = "attribute-timeout=0,entry-timeout=0,direct-io-mode=enable"

VOLUME = r"""
  mkdir -p /var/log/glusterfs /var/lib/glusterd /run/gluster
  glusterd --pid-file=/run/glusterd.pid
  for _ in $(seq 150); do gluster volume list >/dev/null 2>&1 && break; sleep 0.2; done
  gluster --mode=script volume create v gsrv:/brick force || exit 125
  @SETTINGS@
  gluster --mode=script volume start v || exit 125
  mount -t glusterfs @MOUNT@ gsrv:/v /mnt/a && mount -t glusterfs @MOUNT@ gsrv:/v /mnt/b || exit 125
"""


def options(argv: list[str]) -> argparse.Namespace:
    parser = room.argument_parser(__doc__)
    parser.add_argument("--tuned", action="store_true", help="no cache, and more event threads, as a shared log needs")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of the volume")
    given = room.parse(parser, argv)
    if given.tuned:
        given.set = [*TUNED, EVENT_THREADS, *given.set]
        given.mount_options = ",".join(filter(None, [TUNED_MOUNT, given.mount_options]))
    return given


def volume(given: argparse.Namespace) -> str:
    settings = "\n".join(
        f"gluster volume set v {shlex.quote(name)} {shlex.quote(value)} || exit 125"
        for name, value in (pair.split("=", 1) for pair in given.set)
    )
    return VOLUME.replace("@SETTINGS@", settings)


def main(argv: list[str]) -> int:
    given = options(argv)
    if not shutil.which("glusterd"):
        print("glab: apt-get install glusterfs-server glusterfs-client first", file=sys.stderr)
        return 125
    return room.run("glab", "glusterfs", volume(given), given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
