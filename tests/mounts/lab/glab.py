"""Run a command against a GlusterFS volume on this machine: one server, and two FUSE clients at /mnt/a and /mnt/b.

All of it lives in mount, process and network namespaces of its own, on an overlay over this machine's files, and is
gone when the command ends. It needs root, and glusterfs-server and glusterfs-client.

  glab.py [options] -c 'shell text'
  glab.py [options] -- COMMAND [args...]

``on_host b COMMAND`` runs it with a network and a host name of its own: for everybody but the kernel, on another host.
The command sees NFS_A, NFS_B and NFS_VERS=glusterfs. Exit status: the command's; 124 it took too long; 125 no volume.
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

CACHES = "stat-prefetch quick-read io-cache write-behind read-ahead open-behind readdir-ahead".split()
TUNED = [f"performance.{name}=off" for name in CACHES]
"""Without these a client's view is up to a second old, under a lock too."""
EVENT_THREADS = "client.event-threads=16"
"""With the two threads of the default a mount hangs once two of its processes are killed while they wait for a lock
(https://github.com/gluster/glusterfs/issues/4371). The tests kill up to four at once.
"""
TUNED_MOUNT = "attribute-timeout=0,entry-timeout=0,direct-io-mode=enable"

NAMESPACES = r"""
mount --make-rprivate /
mount -t tmpfs t "$1/t" && mkdir "$1/t/u" "$1/t/w" "$1/t/m" || exit 125
mount -t overlay -o "lowerdir=/,upperdir=$1/t/u,workdir=$1/t/w" ov "$1/t/m" || exit 125
cd "$1/t/m" || exit 125
mount -t proc proc proc && mount --rbind /dev dev && mount -t sysfs sys sys && mount -t tmpfs run run || exit 125
mkdir -p mnt/a mnt/b brick var/log/glusterfs var/lib/glusterd run/gluster ".$1"
mount --bind "$1/brick" brick && mount --bind "$1" ".$1" || exit 125
ip link set lo up
exec chroot . /bin/bash "$1/volume.sh"
"""

VOLUME = r"""
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
{
  echo '127.0.0.1 localhost gsrv' >/etc/hosts
  hostname gsrv
  glusterd --pid-file=/run/glusterd.pid
  for _ in $(seq 150); do gluster volume list >/dev/null 2>&1 && break; sleep 0.2; done
  gluster --mode=script volume create v gsrv:/brick force || exit 125
  @SETTINGS@
  gluster --mode=script volume start v || exit 125
  mount -t glusterfs @MOUNT@ gsrv:/v /mnt/a && mount -t glusterfs @MOUNT@ gsrv:/v /mnt/b || exit 125
  for _ in $(seq 150); do mountpoint -q /mnt/a && mountpoint -q /mnt/b && break; sleep 0.2; done
  mountpoint -q /mnt/a && mountpoint -q /mnt/b || exit 125
} >&2
cat >/usr/local/bin/on_host <<'X'
#!/bin/sh
# on_host a|b COMMAND...: run it as on that host
[ "$1" = b ] || { shift; exec "$@"; }
shift
exec unshare --net --uts sh -c 'hostname gother; exec "$@"' sh "$@"
X
chmod +x /usr/local/bin/on_host
export NFS_A=/mnt/a NFS_B=/mnt/b NFS_VERS=glusterfs
cd @CWD@ || exit 125
@COMMAND@
status=$?
umount /mnt/a /mnt/b
exit $status
"""


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", action="store_true", help="no cache, and more event threads, as a shared log needs")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--mount-options", default="")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of the volume")
    parser.add_argument("-c", dest="shell")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    if given.tuned:
        given.set = [*TUNED, EVENT_THREADS, *given.set]
        given.mount_options = ",".join(filter(None, [TUNED_MOUNT, given.mount_options]))
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    given.shell = given.shell or shlex.join(command)
    if not given.shell:
        parser.error("no command")
    return given


def script(given: argparse.Namespace) -> str:
    settings = "\n".join(
        f"gluster volume set v {shlex.quote(name)} {shlex.quote(value)} || exit 125"
        for name, value in (pair.split("=", 1) for pair in given.set)
    )
    mount = f"-o {shlex.quote(given.mount_options)}" if given.mount_options else ""
    filled = VOLUME.replace("@SETTINGS@", settings).replace("@MOUNT@", mount).replace("@CWD@", shlex.quote(os.getcwd()))
    return filled.replace("@COMMAND@", given.shell)


def main(argv: list[str]) -> int:
    given = options(argv)
    if not shutil.which("glusterd"):
        print("glab: apt-get install glusterfs-server glusterfs-client first", file=sys.stderr)
        return 125
    run = Path(tempfile.mkdtemp(prefix="glab-"))
    for name in ("brick", "t"):
        (run / name).mkdir()
    (run / "volume.sh").write_text(script(given))
    command = ["unshare", "--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "--kill-child"]
    environment = os.environ | {"LD_LIBRARY_PATH": "/usr/lib/x86_64-linux-gnu"}
    process = subprocess.Popen(
        [*command, "bash", "-c", NAMESPACES, "glab", str(run)], stdin=subprocess.DEVNULL, env=environment
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    begun = time.monotonic()
    try:
        status = process.wait(given.timeout)
    except subprocess.TimeoutExpired:
        status = 124
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(run, ignore_errors=True)
    print(f"glab: exit {status}; total {time.monotonic() - begun:.1f} s", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
