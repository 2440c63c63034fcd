"""A real etcd on loopback, with a data directory of its own, that tests start, stop, kill and start again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.ports import held_port
from support.processes import stop

from fscoord.stores.etcd import EtcdStore

__all__ = ["Server", "Trio"]

START_S = 60
"""How long etcd may take to answer; it only bounds a hang."""

HOW_TO_GET_IT = (
    "there is no etcd on PATH, which these tests start: apt-get install etcd-server (Debian, Ubuntu), or unpack a"
    " release of https://github.com/etcd-io/etcd, 3.4 or newer, and put it on PATH"
)


class Server:
    """One etcd process, which keeps its port and its data over `kill` and `start`."""

    def __init__(self, *options: str, scheme: str = "http") -> None:
        self._program = shutil.which("etcd")
        assert self._program, HOW_TO_GET_IT
        self._directory = tempfile.mkdtemp(prefix="fscoord-etcd-")
        self._options = options
        self._scheme = scheme
        self._process: subprocess.Popen[bytes] | None = None
        self._held = ExitStack()
        self.port = self._held.enter_context(held_port())
        try:
            self.start()
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return Path(self._directory, "log").read_text(errors="replace")

    def start(self) -> None:
        """Start it, and return when it answers. If it ends, because its port is not free yet, try again."""
        end = time.monotonic() + START_S
        while True:
            assert time.monotonic() < end, f"etcd does not start: {self.log[-2000:]}"
            self._process = self._begin(self.port)
            if self._answers(self.port, end):
                return
            self.kill()
            time.sleep(0.05)

    def kill(self) -> None:
        """End it as a power cut would, but for what the kernel has of its files."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Have it say nothing, with all its connections open, until `resume`."""
        stop(self._process.pid)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it for good."""
        self._end(signal.SIGKILL)
        self._held.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def open(self, prefix: str, timeout: float = 60, **options: object) -> EtcdStore:
        return EtcdStore(f"{self._scheme}://{self.address}", prefix, timeout, **options)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    def _begin(self, port: int) -> subprocess.Popen[bytes]:
        here = f"{self._scheme}://127.0.0.1:{port}"
        with open(Path(self._directory, "log"), "ab") as log:
            return subprocess.Popen(
                [
                    self._program,
                    f"--data-dir={self._directory}/data",
                    f"--listen-client-urls={here}",
                    f"--advertise-client-urls={here}",
                    "--listen-peer-urls=http://127.0.0.1:0",
                    *self._options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "ETCD_UNSUPPORTED_ARCH": os.uname().machine.replace("aarch64", "arm64")},
            )

    def _answers(self, port: int, end: float) -> bool:
        while self._process.poll() is None and time.monotonic() < end:
            if self._scheme == "https":  # what asks for a certificate answers nobody; the port must do
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        return True
            else:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=START_S) as reply:
                        if b"true" in reply.read():
                            return True
                except (urllib.error.URLError, OSError):
                    pass
            time.sleep(0.01)
        return False


class Trio:
    """A cluster of three members, one of which may be killed."""

    def __init__(self) -> None:
        program = shutil.which("etcd")
        assert program, HOW_TO_GET_IT
        self._directory = tempfile.mkdtemp(prefix="fscoord-etcd-")
        self.members: list[subprocess.Popen[bytes]] = []
        self._held = ExitStack()
        self.ports: list[int] = []
        try:
            self._start(program)
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def kill(self, number: int) -> None:
        self.members[number].kill()
        self.members[number].wait()

    def leader(self) -> int:
        """Return the number of the member that leads."""
        end = time.monotonic() + START_S
        while True:
            assert time.monotonic() < end, "there is no leader"
            for number, port in enumerate(self.ports):
                status = _status(port)
                if status and status.get("leader", "0") == status["header"]["member_id"]:
                    return number
            time.sleep(0.05)

    def stop(self) -> None:
        for member in self.members:
            member.kill()
            member.wait()
        self._held.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, program: str) -> None:
        self.ports = [self._held.enter_context(held_port()) for _ in range(3)]
        peers = [f"http://127.0.0.1:{self._held.enter_context(held_port())}" for _ in range(3)]
        for number, port in enumerate(self.ports):
            here = f"http://127.0.0.1:{port}"
            with open(Path(self._directory, f"log{number}"), "ab") as log:
                self.members.append(
                    subprocess.Popen(
                        [
                            program,
                            f"--name=m{number}",
                            f"--data-dir={self._directory}/{number}",
                            f"--listen-client-urls={here}",
                            f"--advertise-client-urls={here}",
                            f"--listen-peer-urls={peers[number]}",
                            f"--initial-advertise-peer-urls={peers[number]}",
                            f"--initial-cluster={','.join(f'm{each}={peer}' for each, peer in enumerate(peers))}",
                            "--heartbeat-interval=300",  # so that a busy machine makes no elections
                            "--election-timeout=3000",
                        ],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
        self.leader()


def _status(port: int) -> dict[str, Any] | None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v3/maintenance/status", b"{}")
    try:
        with urllib.request.urlopen(request, timeout=START_S) as reply:
            return json.loads(reply.read())
    except (OSError, ValueError):
        return None
