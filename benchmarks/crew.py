"""Run a task in several processes that begin together, and return their results.

The processes are forked by a clean server process that has torch imported and nothing opened: 64 processes that each
import torch would take longer than the measurement itself.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

LIMIT_S = 300.0


@dataclass(frozen=True)
class Member:
    """One process of a crew."""

    rank: int
    size: int
    pipe: Connection

    def start(self) -> None:
        """Report that this process is ready, and return when all processes are ready."""
        self.pipe.send("ready")
        self.pipe.recv()


def run(
    task: Callable[..., Any],
    size: int,
    *args: Any,
    during: AbstractContextManager[object] | None = None,
    limit_s: float = LIMIT_S,
) -> list[Any]:
    """Call ``task(member, *args)`` in `size` processes and return the results, by rank.

    `during` is entered when all processes are ready, and left when all results are there. The
    whole takes at most `limit_s` seconds.

    Raises:
        RuntimeError: a process failed, or did not end in time. No process is left behind.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.preload"])
    pipes, processes = [], []
    try:
        for rank in range(size):
            here, there = context.Pipe()
            pipes.append(here)
            process = context.Process(target=_member, args=(task, Member(rank, size, there), args), daemon=True)
            processes.append(process)
            process.start()
            there.close()
        deadline = time.monotonic() + limit_s
        for pipe in pipes:  # 200 processes may take a minute to be there, which no store's time-out should see
            _receive(pipe, deadline)
        for pipe in pipes:
            pipe.send("go")
        for pipe in pipes:
            _receive(pipe, deadline)
        with during or nullcontext():
            for pipe in pipes:
                pipe.send("go")
            results = [_receive(pipe, deadline) for pipe in pipes]
    except BaseException:
        for process in processes:
            if process.pid is not None:
                process.kill()
        raise
    else:
        return results
    finally:
        for process in processes:
            if process.pid is None:
                continue
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in pipes:
            pipe.close()


def _member(task: Callable[..., Any], member: Member, args: tuple[Any, ...]) -> None:
    with suppress(OSError):  # the other end is gone when somebody else has failed
        try:
            member.start()
            member.pipe.send(task(member, *args))
        except BaseException as error:  # noqa: BLE001 - the process that measures raises it
            member.pipe.send(RuntimeError(f"rank {member.rank}: {error!r}"))


def _receive(pipe: Connection, deadline: float) -> Any:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        raise RuntimeError("a process of the crew did not answer in time")
    try:
        message = pipe.recv()
    except EOFError:
        raise RuntimeError("a process of the crew died") from None
    if isinstance(message, Exception):
        raise message
    return message
