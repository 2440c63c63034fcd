"""Which file system a path is on, by the mount table."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.faulty import faulty_os
from support.internals import COHERENCES, Mount, find_mount, system

TABLE = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,discard
23 22 0:5 / /proc rw,nosuid - proc proc rw
30 22 0:40 / /home rw,relatime shared:2 master:1 - nfs4 server:/home rw,vers=4.2,addr=10.0.0.1
31 30 0:41 / /home/a\040b\134c rw - tmpfs tmpfs rw
32 22 0:42 / /mnt rw - tmpfs hidden rw
33 22 0:43 / /mnt rw - lustre 10.0.0.1@tcp:/fs rw,flock,checksum,encrypt,lazystatfs,lruresize,nolock,statfs_project
34 22 0:44 / /plain rw - overlay overlay
35 22 0:45 / /auto rw - autofs systemd-1 rw,fd=36
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
def test_mount_is_the_longest_match_and_the_later_of_two_at_one_point(path: str, kind: str, is_local: bool) -> None:
    mount = find_mount(path)
    assert (mount.kind, mount.is_local) == (kind, is_local)


def test_mount_options_include_those_of_the_file_system() -> None:
    options = ("rw", "relatime", "rw", "vers=4.2", "addr=10.0.0.1")
    assert find_mount("/home/store") == Mount("nfs4", "/home", options)


def test_mount_is_unknown_and_local_without_a_mount_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "mount_table", list)
    assert find_mount("/store") == Mount("", "", ())
    assert find_mount("/store").is_local


def test_unknown_file_system_is_assumed_to_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "mount_table", lambda: ["1 0 0:1 / / rw - fuse.something x rw"])
    assert not find_mount("/store").is_local


def on(kind: str, *options: str) -> Mount:
    return Mount(kind, "/shared", ("rw", *options))


@pytest.fixture
def lost_locks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    recovers = [False]
    monkeypatch.setattr(system, "nfs_recovers_lost_locks", lambda: recovers[0])
    return recovers


@pytest.mark.parametrize(
    ("kind", "coherence"),
    [
        ("ext4", "local"),
        ("", "local"),
        ("nfs", "direct"),
        ("nfs4", "direct"),
        ("lustre", "direct"),
        ("gpfs", "locked"),
        ("beegfs", "locked"),
        ("ceph", "locked"),
        ("fuse.ceph-fuse", "direct"),
        ("fuse.ceph", "direct"),
        ("cifs", "locked"),
        ("fuse.glusterfs", "locked"),
        ("9p", "locked"),
        ("never heard of it", "locked"),
    ],
)
def test_coherence_follows_from_the_kind_of_file_system(kind: str, coherence: str) -> None:
    assert on(kind).coherence == coherence


@pytest.mark.parametrize(
    ("mount", "locks"),
    [
        (on("nfs", "vers=3", "local_lock=all"), {"ofd", "flock"}),
        (on("nfs", "vers=3", "nolock", "local_lock=all"), {"ofd", "flock"}),
        (on("nfs", "vers=3", "nolock"), {"ofd", "flock"}),
        (on("nfs", "vers=3", "local_lock=flock"), {"flock"}),
        (on("nfs", "vers=3", "local_lock=posix"), {"ofd"}),
        (on("nfs", "vers=3", "local_lock=none"), set()),
        (on("nfs4", "vers=4.2", "local_lock=none"), set()),
        (on("lustre", "flock"), set()),
        (on("lustre", "flock", "checksum", "nolock"), set()),  # Lustre's nolock is not that of NFS
        (on("lustre", "localflock", "nolock"), {"ofd", "flock"}),
        (on("lustre", "nolock"), {"ofd", "flock"}),
        (on("lustre", "localflock"), {"ofd", "flock"}),
        (on("lustre", "noflock"), {"ofd", "flock"}),
        (on("lustre"), {"ofd", "flock"}),
        (on("gpfs"), {"flock"}),
        (on("cifs", "nobrl"), {"ofd", "flock", "soft"}),
        (on("cifs", "vers=3.1.1", "cache=strict", "actimeo=1"), {"ofd", "flock", "soft"}),
        (on("smb3", "vers=3.1.1", "cache=none", "actimeo=0"), {"ofd", "flock", "soft"}),
        (on("fuse.sshfs"), {"ofd", "flock", "soft"}),
        (on("fuse.glusterfs"), {"ofd", "flock", "soft"}),
        (on("fuse.ceph-fuse"), {"ofd", "flock", "soft"}),
        (on("ceph"), set()),
        (on("beegfs"), set()),
        (on("ext4"), set()),
        (on(""), set()),
    ],
)
def test_mount_options_that_break_locks_are_refused_for_those_lock_kinds(
    mount: Mount, locks: set[str], lost_locks: list[bool]
) -> None:
    assert {lock for lock in ("ofd", "flock", "soft") if mount.objection(lock)} == locks


@pytest.mark.parametrize("mount", [on("nfs4", "vers=4.2"), on("nfs", "vers=4.1"), on("nfs", "vers=3")])
def test_nfs_client_that_recovers_lost_locks_is_refused(mount: Mount, lost_locks: list[bool]) -> None:
    lost_locks[0] = True
    refused = "recover_lost_locks" in str(mount.objection("ofd"))
    assert refused == ("vers=3" not in mount.options)  # there a lock is never taken away
    assert mount.objection("soft") is None
    lost_locks[0] = False
    assert mount.objection("ofd") is None


@pytest.mark.parametrize(("text", "recovers"), [("Y", True), ("N", False), ("1", True), ("", False)])
def test_lost_lock_recovery_is_read_from_the_kernel_parameter(
    text: str, recovers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "_proc_text", {"/sys/module/nfs/parameters/recover_lost_locks": text}.__getitem__)
    assert system.nfs_recovers_lost_locks() == recovers


UNLOCKED = [
    on("nfs", "nolock"),
    on("nfs4", "vers=4.2", "local_lock=all"),
    on("lustre", "localflock"),
    on("lustre"),
    on("cifs", "nobrl"),
    on("fuse.sshfs"),
]


@pytest.mark.parametrize("mount", UNLOCKED)
@pytest.mark.parametrize("coherence", [None, *COHERENCES])
def test_way_to_read_answers_no_objection_to_the_locks(mount: Mount, coherence: str | None) -> None:
    found = mount.objection("ofd", coherence)
    assert found is not None
    assert "trust_locks=True" in found.remedy
    assert "coherence" not in found.remedy


@pytest.mark.parametrize("mount", [mount for mount in UNLOCKED if mount.kind != "cifs"])
@pytest.mark.parametrize("coherence", COHERENCES)
def test_trust_in_the_locks_answers_the_objection_to_them(mount: Mount, coherence: str) -> None:
    assert mount.objection("ofd", coherence, trusts_locks=True) is None


def test_trust_in_the_locks_answers_no_objection_to_the_reads() -> None:
    """Only a way to read answers that; on GlusterFS, ceph-fuse and SMB only one."""
    assert on("fuse.sshfs").objection("ofd", trusts_locks=True) == on("fuse.sshfs").objection("soft")
    assert on("fuse.sshfs").objection("soft", "local") is None
    for trusts in (False, True):
        refused = [
            each for each in (None, *COHERENCES) if on("fuse.glusterfs").objection("ofd", each, trusts_locks=trusts)
        ]
        assert refused == [None, "local", "direct"]
        refused = [
            each for each in (None, *COHERENCES) if on("fuse.ceph-fuse").objection("ofd", each, trusts_locks=trusts)
        ]
        assert refused == [None, "local", "locked"]
        for kind in ("cifs", "smb3"):
            refused = [each for each in (None, *COHERENCES) if on(kind).objection("ofd", each, trusts_locks=trusts)]
            assert refused == [None, "direct", "locked"]
    assert on("cifs").objection("flock", "local")
    assert on("cifs", "nobrl").objection("ofd", "local")
    assert on("cifs", "nobrl").objection("ofd", "local", trusts_locks=True) is None


def test_setting_that_cannot_be_checked_is_named_in_a_caution() -> None:
    assert "tuneUseGlobalFileLocks" in (on("beegfs").caution or "")
    assert on("nfs4").caution is None


def test_mount_option_is_found_with_or_without_a_value() -> None:
    mount = on("nfs", "vers=3", "nolock")
    assert (mount.option("vers"), mount.option("nolock"), mount.option("soft")) == ("3", "", None)


def test_directory_mounted_on_demand_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [TABLE, [*TABLE, "36 35 0:46 / /auto rw - nfs4 server:/x rw,vers=4.2"]]
    monkeypatch.setattr(system, "mount_table", lambda: tables.pop(0) if len(tables) > 1 else tables[0])
    asked: list[str] = []
    monkeypatch.setattr(system, "open_file", lambda path, *_: asked.append(path) or os.open(os.devnull, os.O_RDONLY))
    assert find_mount("/auto/store").kind == "nfs4"
    assert asked == ["/auto"]


def test_automounted_directory_is_looked_up_once_it_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"35 22 0:45 / {tmp_path} rw - autofs systemd-1 rw"]
    monkeypatch.setattr(system, "mount_table", lambda: lines)

    def mount(name: str, real: object, given: tuple[object, ...]) -> None:
        if name == "open" and given[0] == str(tmp_path):
            lines.append(f"36 35 0:46 / {tmp_path} rw - nfs4 server:/ rw")

    with faulty_os() as faulty, faulty.instead(mount):
        assert find_mount(str(tmp_path / "store")).kind == "nfs4"


def test_directory_that_cannot_be_mounted_stays_autofs() -> None:
    assert find_mount("/auto/there is no such directory/store").kind == "autofs"
