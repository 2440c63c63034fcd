"""A host sees a file that the other host has just written, at its first look."""

from __future__ import annotations

import hashlib
import os

from mounts.agents import Agent
from mounts.conftest import Sides

from fscoord.errors import StoreTimeoutError

WAIT = "fscoord.visibility.wait_visible"


def write(agent: Agent, path: str, data: bytes) -> None:
    fd = agent.do("os.open", path, os.O_WRONLY | os.O_CREAT)
    agent.do("os.write", fd, data)
    agent.do("os.close", fd)


def test_name_that_this_host_has_looked_for_is_seen_at_once(sides: Sides) -> None:
    for round in range(3):
        writer, reader = (host.fork() for host in ((sides.a, sides.b) if round % 2 else (sides.b, sides.a)))
        names = [sides.full(agent.host, f"data{round}") for agent in (writer, reader)]
        assert not reader.do("os.path.exists", names[1])  # a client now keeps a negative entry
        assert isinstance(reader.begin(WAIT, names[1], timeout=0).error(), StoreTimeoutError)
        assert not reader.do("os.path.exists", names[1])
        write(writer, names[0], b"data")
        reader.do(WAIT, names[1], timeout=0)
        assert reader.do("os.path.exists", names[1])


def test_file_in_a_directory_that_this_host_has_looked_for_is_seen(sides: Sides) -> None:
    writer, reader = sides.agents(2)
    below = [sides.full(agent.host, "one/two") for agent in (writer, reader)]
    assert not reader.do("os.path.exists", below[1])
    assert isinstance(reader.begin(WAIT, f"{below[1]}/data", timeout=0).error(), StoreTimeoutError)
    writer.do("os.makedirs", below[0])
    write(writer, f"{below[0]}/data", b"data")
    reader.do(WAIT, f"{below[1]}/data", size=4, timeout=60)


def test_contents_are_new_though_this_host_has_the_file_open_for_writing(sides: Sides) -> None:
    """Then a client keeps the pages that it has cached, and a reader of a longer file gets NUL bytes."""
    writer, reader = sides.agents(2)
    names = [sides.full(agent.host, "data") for agent in (writer, reader)]
    write(writer, names[0], b"old")
    reader.do(WAIT, names[1], size=3, timeout=0)
    fd = reader.do("os.open", names[1], os.O_RDWR)
    assert reader.do("os.pread", fd, 100, 0) == b"old"
    for data in (b"new", b"newer", b"newer and longer"):
        write(writer, names[0], data)
        reader.do(WAIT, names[1], size=len(data), sha256=hashlib.sha256(data).hexdigest(), timeout=0)
        assert reader.do("os.pread", fd, 100, 0) == data
