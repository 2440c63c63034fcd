"""Which file system a path is on, by the mount table."""

from __future__ import annotations

import pytest

from fscoord import _system as system
from fscoord._log.mount import Mount, find_mount

TABLE = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,discard
23 22 0:5 / /proc rw,nosuid - proc proc rw
30 22 0:40 / /home rw,relatime shared:2 master:1 - nfs4 server:/home rw,vers=4.2,addr=10.0.0.1
31 30 0:41 / /home/a\040b\134c rw - tmpfs tmpfs rw
32 22 0:42 / /mnt rw - tmpfs hidden rw
33 22 0:43 / /mnt rw - lustre 10.0.0.1@tcp:/fs rw,flock
34 22 0:44 / /plain rw - overlay overlay
garbled
""".strip().splitlines()


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "mount_table", lambda: TABLE)


@pytest.mark.parametrize(
    ("path", "kind", "is_local"),
    [
        ("/store", "ext4", True),
        ("/", "ext4", True),
        ("/home", "nfs4", False),
        ("/home/user/store", "nfs4", False),
        ("/homestead/store", "ext4", True),
        ("/home/a b\\c/store", "tmpfs", True),
        ("/mnt/store", "lustre", False),
        ("/plain/store", "overlay", True),
    ],
)
def test_the_longest_mount_point_counts_and_of_two_at_one_the_later(path: str, kind: str, is_local: bool) -> None:
    mount = find_mount(path)
    assert (mount.kind, mount.is_local) == (kind, is_local)


def test_the_options_are_those_of_the_mount_and_of_the_file_system() -> None:
    options = ("rw", "relatime", "rw", "vers=4.2", "addr=10.0.0.1")
    assert find_mount("/home/store") == Mount("nfs4", "/home", options)


def test_without_a_mount_table_nothing_is_known_and_the_path_counts_as_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "mount_table", list)
    assert find_mount("/store") == Mount("", "", ())
    assert find_mount("/store").is_local


def test_an_unknown_file_system_is_taken_for_one_that_hosts_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "mount_table", lambda: ["1 0 0:1 / / rw - fuse.something x rw"])
    assert not find_mount("/store").is_local
