"""A process that holds a log's lock and is stopped: ``python holder.py PATH LOCK WHERE``, and `Holder` to run it.

WHERE says what of its record is in the file when it stops: "nothing", "half" or "all".
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import fscoord
from fscoord._runtime import system
from fscoord.stores.file import FileStore

PATIENCE_S = 60


class StoppingOs(types.ModuleType):
    """`os`, but the first write stops the process."""

    def __init__(self, where: str) -> None:
        super().__init__("os")
        self._share = {"nothing": 0.0, "half": 0.5, "all": 1.0}[where]
        self._stopped = False

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: bytes) -> int:
        if self._stopped:
            return os.write(fd, data)
        self._stopped = True
        written = int(len(data) * self._share)
        if written:
            os.write(fd, data[:written])
        os.kill(os.getpid(), signal.SIGSTOP)
        if written < len(data):
            os.write(fd, data[written:])
        return len(data)


class Holder:
    """Run a holder until it has stopped with the lock; it is killed and reaped at the end of the ``with``."""

    def __init__(self, path: Any, lock: str = "ofd", where: str = "half", introduced: bool = True) -> None:
        root = str(Path(fscoord.__file__).parent.parent)
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(path), lock, where, str(int(introduced))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([root, str(Path(__file__).parent.parent)])},
        )
        found = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert found is not None
        assert found.si_code == os.CLD_STOPPED, "the holder died before it could stop"

    @property
    def name(self) -> str:
        return f"{os.uname().nodename}:{self.process.pid}"

    def resume(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def finish(self) -> str:
        """Let it go on to its end, and return what it said: the value of "held" that it read."""
        self.resume()
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0
        return out.strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


def main(path: str, lock: str, where: str, introduced: str) -> None:
    with FileStore(path, lock=lock) as store:
        if introduced == "1":
            store.set("holder", "1")
        system.os = StoppingOs(where)
        store.set("held", "by the holder")
        system.os = os
        print(store.get("held").decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
