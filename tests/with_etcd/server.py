"""A real etcd on loopback, with a data directory of its own, that tests start, stop, kill and start again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from fscoord.stores.etcd import EtcdStore

__all__ = ["Server"]

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
        self.port = 0
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
        """Start it, and return when it answers. A port that somebody took meanwhile is tried again, or another."""
        end = time.monotonic() + START_S
        while True:
            assert time.monotonic() < end, f"etcd does not start: {self.log[-2000:]}"
            port = self.port or free_port()
            self._process = self._begin(port)
            if self._answers(port, end):
                self.port = port
                return
            self.kill()
            time.sleep(0.05)

    def kill(self) -> None:
        """End it as a power cut would, but for what the kernel has of its files."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Have it say nothing, with all its connections open, until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it for good."""
        self._end(signal.SIGKILL)
        shutil.rmtree(self._directory, ignore_errors=True)

    def open(self, prefix: str, timeout: float = 20, **options: object) -> EtcdStore:
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
