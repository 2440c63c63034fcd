"""A lab's room: a machine that plays one server and two client hosts, which mount its directory at /mnt/a and /mnt/b.

All of it lives in mount, process and network namespaces of its own, on an overlay over this machine's files, and is
gone when the command ends. It needs root.

``on_host b COMMAND`` runs it with a network and a host name of its own: for everybody but the kernel, on another host.
The command sees NFS_A, NFS_B and NFS_VERS. Exit status: the command's; 124 it took too long; 125 no mounts.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMESPACES = r"""
mount --make-rprivate /
mount -t tmpfs t "$1/t" && mkdir "$1/t/u" "$1/t/w" "$1/t/m" || exit 125
mount -t overlay -o "lowerdir=/,upperdir=$1/t/u,workdir=$1/t/w" ov "$1/t/m" || exit 125
cd "$1/t/m" || exit 125
mount -t proc proc proc && mount --rbind /dev dev && mount -t sysfs sys sys && mount -t tmpfs run run || exit 125
mkdir -p mnt/a mnt/b brick ".$1"
mount --bind "$1/brick" brick && mount --bind "$1" ".$1" || exit 125
ip link set lo up
exec chroot . /bin/bash "$1/room.sh"
"""

ROOM = r"""
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
libraries=$LD_LIBRARY_PATH
export LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu # for Debian's programs alone: the command may be another Python's
{
  echo '127.0.0.1 localhost gsrv' >/etc/hosts
  hostname gsrv
  @SERVER@
  for _ in $(seq 150); do mountpoint -q /mnt/a && mountpoint -q /mnt/b && break; sleep 0.2; done
  mountpoint -q /mnt/a && mountpoint -q /mnt/b || exit 125
} >&2
export LD_LIBRARY_PATH=$libraries
cat >/usr/local/bin/on_host <<'X'
#!/bin/sh
# on_host a|b COMMAND...: run it as on that host
[ "$1" = b ] || { shift; exec "$@"; }
shift
exec unshare --net --uts sh -c 'hostname gother; exec "$@"' sh "$@"
X
chmod +x /usr/local/bin/on_host
export NFS_A=/mnt/a NFS_B=/mnt/b NFS_VERS=@KIND@
cd @CWD@ || exit 125
@COMMAND@
status=$?
umount /mnt/a /mnt/b
exit $status
"""


def argument_parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that each lab has."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--mount-options", default="")
    parser.add_argument("-c", dest="shell")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Return the arguments, with the command as the shell text ``shell``."""
    given = parser.parse_args(argv)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    given.shell = given.shell or shlex.join(command)
    if not given.shell:
        parser.error("no command")
    return given


def run(lab: str, kind: str, server: str, given: argparse.Namespace) -> int:
    """Run the command of `given` after `server`, a shell text, has made both mounts. Return the exit status.

    In `server`, ``@MOUNT@`` stands for the options of the mounts, and /brick is a directory on this machine's disk.
    """
    room = Path(tempfile.mkdtemp(prefix=f"{lab}-"))
    for name in ("brick", "t"):
        (room / name).mkdir()
    filled = ROOM.replace("@SERVER@", server).replace("@KIND@", kind).replace("@CWD@", shlex.quote(os.getcwd()))
    mount = f"-o {shlex.quote(given.mount_options)}" if given.mount_options else ""
    (room / "room.sh").write_text(filled.replace("@MOUNT@", mount).replace("@COMMAND@", given.shell))
    command = ["unshare", "--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "--kill-child"]
    process = subprocess.Popen([*command, "bash", "-c", NAMESPACES, lab, str(room)], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    begun = time.monotonic()
    try:
        status = process.wait(given.timeout)
    except subprocess.TimeoutExpired:
        status = 124
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(room, ignore_errors=True)
    print(f"{lab}: exit {status}; total {time.monotonic() - begun:.1f} s", file=sys.stderr)
    return status
