"""Run a command against a kernel NFS server and two NFS clients, in a small Linux booted from this machine's own files.

Inside, the kernel's NFS server exports an ext4 disk, and two client hosts or more (network and host-name namespaces,
each with its own link, NFS client and cache) mount it at /mnt/a, /mnt/b and so on. What is written there vanishes at
the end, apart from what is under --out.

  nfslab [options] PROGRAM.py [args...]        run by --python
  nfslab [options] -- COMMAND [args...]
  nfslab [options] -c 'shell text'

The command sees NFS_A, NFS_B, NFS_HOSTS, NFS_SERVER_DIR, NFS_VERS, NFS_OUT, and has these commands:
  on_host a|b COMMAND       run it with that client's network and host name
  link_host a|b up|down     cut that client's network, or heal it
  nfs_server stop|start|restart|endgrace|notify
Exit status: the command's; 124 it took too long; 125 the lab itself failed: it could not be built, or its guest did not
boot, or froze.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CACHE = Path(__file__).resolve().parent  # `nfslab` copies this file beside what it built
PORTS = ("out", "status", "ready")
"""What the guest says: the command's output, its exit status, and a byte every 5 s from when it is ready to begin."""
BOOT_S = 180
"""How long a guest may boot, in seconds. It takes 5 to 30 s."""
FROZEN_S = 120
"""After how many seconds without such a byte a guest counts as frozen. A busy guest still says one in a few seconds."""
LOGS = ("console.log", "engine.log", "host.log")


def die_with_parent() -> None:
    """Let the kernel kill this child when nfslab ends, however it ends (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    engines = "qemu: emulated, 2 CPUs, slow, some 18 s to boot; uml: User Mode Linux, 1 CPU, native speed, 5 s"
    add("--engine", default=os.environ.get("NFSLAB_ENGINE", "qemu"), choices=["qemu", "uml"], help=engines)
    add("--vers", default="4.2", choices=["3", "4.0", "4.1", "4.2"])
    add("--opts", default="", help="more mount options for both clients, e.g. actimeo=0")
    layouts = "nosharecache: one host with two superblocks, which is no stand-in for two hosts on version 4"
    add("--layout", default="hosts", choices=["hosts", "nosharecache"], help=layouts)
    add("--hosts", type=int, default=2, choices=range(2, 17), metavar="2..16", help="how many client hosts")
    add("--backing", default="ext4", choices=["ext4", "tmpfs"])
    add("--async-export", action="store_true")
    add("--rtt", type=float, default=0, help="delay added to each reply, in ms (netem)")
    add("--lease", type=int, default=90, help="NFSv4 lease, in seconds (the kernel's default is 90)")
    add("--grace", type=int, default=90, help="seconds of grace after a server restart")
    add("--timeout", type=float, default=300, help="seconds for the whole run")
    add("--smp", type=int, default=2)
    once = "run uml on this CPU only. The host moves it between CPUs otherwise, and a system call takes 50 us, not 14"
    add("--cpu", type=int, help=once)
    add("--mem", type=int, default=2048, help="MiB")
    add("--disk", type=int, default=1024, help="size of the export, MiB (sparse)")
    add("--out", default="", help="a folder of this machine that the guest may write, as /out")
    add("--python", default=os.environ.get("NFSLAB_PYTHON", sys.executable))
    add("--env", action="append", default=[], metavar="K=V")
    add("-c", dest="shell")
    add("-v", "--verbose", action="store_true", help="show the guest's console at the end")
    add("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if given.shell is None:
        if not command:
            parser.error("no command")
        if command[0].endswith(".py"):
            command = [given.python, "-u", os.path.abspath(command[0]), *command[1:]]
        given.shell = shlex.join(command)
    return given


class Run:
    """One boot of the guest, its files in a directory of their own, and its processes; all gone at the end."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        (CACHE / "runs").mkdir(exist_ok=True)
        self.directory = Path(tempfile.mkdtemp(prefix="r", dir=CACHE / "runs"))
        self.processes: list[subprocess.Popen[bytes]] = []
        self.started = time.monotonic()
        self.ready: float | None = None

    def write_files(self) -> None:
        given = self.given
        exports = "".join(f"export {k}={shlex.quote(v)}\n" for k, v in (pair.split("=", 1) for pair in given.env))
        (self.directory / "cmd.sh").write_text(f"{exports}{given.shell}\n")
        conf = {
            "VERS": given.vers, "MOPTS": given.opts, "BACK": given.backing, "LEASE": given.lease, "GRACE": given.grace,
            "RTT": given.rtt or 0, "LAYOUT": given.layout, "HOSTS": given.hosts,
            "SYNC": "async" if given.async_export else "sync",
            "CLOCK": f"{time.time() + 2:.3f}", "OUTDIR": given.out, "CWD": os.getcwd(), "TRACE": int(given.verbose),
        }  # fmt: skip
        (self.directory / "conf").write_text("".join(f"{k}={shlex.quote(str(v))}\n" for k, v in conf.items()))
        disk = self.directory / "disk.img"
        with disk.open("wb") as file:
            file.truncate(given.disk << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1", disk], check=True)
        if given.out:
            os.makedirs(given.out, exist_ok=True)

    def start(self, command: list[str], log: str, **more: object) -> subprocess.Popen[bytes]:
        with (self.directory / log).open("w") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
                **more,
            )
        self.processes.append(process)
        return process

    def boot_uml(self) -> dict[str, socket.socket]:
        given, ours, theirs = self.given, {}, []
        # A PID namespace of its own: when its first process ends, nothing of it is left.
        command = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", '"$@"; exit $?', "sh", "linux.uml"]
        command += [f"mem={given.mem}M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"]
        command += [
            f"init={CACHE}/init.uml",
            "con=null",
            "con0=null,fd:1",
            "ssl=null",
            f"ubd0={self.directory}/disk.img",
        ]
        command += ["loglevel=6", "panic=1", f"nfslab.dir={CACHE}", f"nfslab.run={self.directory}"]
        for number, name in enumerate(PORTS, 1):
            ours[name], other = socket.socketpair()
            theirs.append(other)
            command.append(f"con{number}=null,fd:{other.fileno()}")
        environment = os.environ | {"TMPDIR": "/dev/shm", "LD_PRELOAD": f"{CACHE}/uml/shim.so"}
        fds = [other.fileno() for other in theirs]
        # A session of its own: UML is a family of processes, ended by one killpg.
        if given.cpu is not None:
            command = ["taskset", "--cpu-list", str(given.cpu), *command]
        self.start(command, "engine.log", pass_fds=fds, env=environment, start_new_session=True)
        for other in theirs:
            other.close()
        return ours

    def boot_qemu(self) -> dict[str, socket.socket]:
        given, run = self.given, self.directory
        kernel = (CACHE / "guest.kver").read_text().strip()
        memory = f"memory-backend-memfd,id=mem,size={given.mem}M,share=on"
        command = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off", "-smp", str(given.smp)]
        command += ["-m", str(given.mem), "-object", memory, "-machine", "pc,memory-backend=mem"]
        command += ["-nodefaults", "-display", "none", "-no-reboot", "-no-user-config"]
        command += ["-kernel", f"/boot/vmlinuz-{kernel}", "-initrd", f"{CACHE}/guest.cpio", "-append"]
        boot = "console=ttyS0 loglevel=6 panic=-1 mitigations=off tsc=reliable nowatchdog"
        command += [f"{boot} nfslab.dir={CACHE} nfslab.run={run}"]
        command += ["-chardev", f"file,id=con,path={run}/console.log", "-serial", "chardev:con"]
        command += ["-device", "virtio-serial-pci", "-device", "virtio-blk-pci,drive=d0"]
        command += ["-drive", f"file={run}/disk.img,if=none,id=d0,format=raw,cache=unsafe"]
        command += self.share("host", "/", "always")
        if given.out:
            command += self.share("out", os.path.abspath(given.out), "auto")
        listeners = {}
        for name in PORTS:
            listeners[name] = socket.socket(socket.AF_UNIX)
            listeners[name].bind(f"{run}/{name}.port")
            listeners[name].listen(1)
            listeners[name].settimeout(60)
            command += ["-chardev", f"socket,id={name},path={run}/{name}.port"]
            command += ["-device", f"virtserialport,chardev={name},name={name}"]
        environment = os.environ | {"TMPDIR": "/dev/shm"}
        self.start(command, "engine.log", env=environment, start_new_session=True)
        ports = {}
        for name, listener in listeners.items():
            ports[name], _ = listener.accept()
            listener.close()
        return ports

    def share(self, tag: str, source: str, cache: str) -> list[str]:
        """Start the daemon that shows the folder `source` to the guest; return what QEMU must be told."""
        path = self.directory / f"{tag}.sock"
        command = ["/usr/lib/qemu/virtiofsd", f"--socket-path={path}", "-o", f"source={source}", "-o", f"cache={cache}"]
        self.start([*command, "-o", "sandbox=chroot", "-o", "no_posix_lock", "-o", "no_flock"], f"{tag}.log")
        until = time.monotonic() + 60
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.01)
        device = f"vhost-user-fs-pci,chardev=c{tag},tag={tag},queue-size=1024"
        return ["-chardev", f"socket,id=c{tag},path={path}", "-device", device]

    def follow(self, ports: dict[str, socket.socket]) -> int:
        """Pass on what the command prints until the guest ends; return the command's exit status."""
        selector = selectors.DefaultSelector()
        for name, port in ports.items():
            selector.register(port, selectors.EVENT_READ, name)
        status, heard = b"", self.started
        while selector.get_map():
            left = self.started + self.given.timeout - time.monotonic()
            if left <= 0:
                say(f"not done after {self.given.timeout:g} s")
                return 124
            silent = time.monotonic() - heard
            if silent > (BOOT_S if self.ready is None else FROZEN_S):
                happened = "froze while it ended" if status else "did not boot" if self.ready is None else "froze"
                say(f"the guest {happened}: no sign of it for {silent:.0f} s")
                break
            for key, _ in selector.select(min(left, 1)):
                try:
                    data = key.fileobj.recv(65536)
                except ConnectionError:
                    data = b""
                if not data:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                elif key.data == "out":
                    sys.stdout.buffer.write(data)
                    sys.stdout.buffer.flush()
                elif key.data == "status":
                    status += data
                else:
                    heard = time.monotonic()
                    self.ready = self.ready or heard - self.started
        else:
            self.processes[-1].wait(timeout=60)
        return int(status.split()[0]) if status.split() else 125

    def show_logs(self) -> None:
        for name in LOGS:
            path = self.directory / name
            if path.exists():
                print(f"--- {name}\n{path.read_text(errors='replace')[-12000:]}", file=sys.stderr)

    def end(self) -> None:
        if self.processes and self.processes[-1].poll() is None:
            try:
                os.killpg(self.processes[-1].pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for process in reversed(self.processes):
            process.kill()
            process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def say(text: str) -> None:
    print(f"nfslab: {text}", file=sys.stderr, flush=True)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(argv: list[str]) -> int:
    run = Run(options(argv))
    signal.signal(signal.SIGTERM, interrupt)
    status = 125
    try:
        run.write_files()
        status = run.follow(run.boot_uml() if run.given.engine == "uml" else run.boot_qemu())
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        say(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        status = 130
    finally:
        if run.given.verbose or status == 125:
            run.show_logs()
        run.end()
    ready = "never ready" if run.ready is None else f"ready after {run.ready:.1f} s"
    say(f"exit {status}; {ready}; total {time.monotonic() - run.started:.1f} s")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
