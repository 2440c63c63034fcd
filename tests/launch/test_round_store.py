"""`RoundStore`: the store of a round's workers, for several users too, and the remains of a killed round."""

from __future__ import annotations

import logging.handlers
import os
import stat

import pytest
from conftest import GROUP

from fscoord import FileStore, HashStore, StoreUnavailableError, open_store
from fscoord.launch.agent import RoundStore

ALICE, BOB = 64001, 64002


def job(path):
    """Open the store of a rendezvous that a group shares, as each of its agents does."""
    return FileStore(path, mode=0o660, timeout=60)


@pytest.fixture(autouse=True)
def _all_is_imported(tmp_path):
    """Other users may not be able to read the package and the standard library."""
    begin(str(tmp_path / "warm"))
    take_part(str(tmp_path / "warm"))


@pytest.fixture(params=[0o777, 0o2770], ids=["plain", "setgid"])
def path(request, public_dir):
    """Where a group has its job: in a directory whose files get its group, or in one where they do not."""
    os.chown(public_dir, -1, GROUP)
    public_dir.chmod(request.param)
    return str(public_dir / "job")


def begin(path, mode=0o660):
    """Do what the first node does, and its workers; leave the room as it is when its process is killed."""
    with job(path) as store:
        os.chown(path, -1, GROUP)
        os.chmod(path, mode)
        room = RoundStore(store, "0-0", is_first=True).__enter__()
        with open_store(room.address) as workers:
            workers.set("from", "alice")
            workers.announce_rank(0)
        return room.address


def take_part(path):
    """Act as another node and its workers."""
    with job(path) as store, RoundStore(store, "0-0", is_first=False) as room, open_store(room.address) as workers:
        workers.set("and", "bob")
        return room.address, workers.get("from"), [member.pid > 0 for member in workers.members()]


def test_room_of_a_shared_job_is_open_to_all_users_of_its_group(as_member, path):
    address = as_member(ALICE, begin, path)
    assert address == f"file://{path}.round-0-0/store?mode=660"
    made = os.stat(f"{path}.round-0-0")
    assert (stat.S_IMODE(made.st_mode), made.st_gid) == (0o2770, GROUP)
    assert as_member(BOB, take_part, path) == (address, b"alice", [True, True])
    found = [os.stat(f"{path}.round-0-0/{name}") for name in os.listdir(f"{path}.round-0-0")]
    assert {(stat.S_IMODE(each.st_mode), each.st_gid) for each in found} == {(0o660, GROUP)}


def test_room_whose_maker_was_killed_is_made_anew_by_another_user(as_member, path):
    as_member(ALICE, begin, path)

    def begin_again(path):
        with job(path) as store, RoundStore(store, "0-0", is_first=True) as room, open_store(room.address) as workers:
            return workers.num_keys()

    assert as_member(BOB, begin_again, path) == 0
    assert not os.path.exists(f"{path}.round-0-0")


def test_room_is_as_closed_as_the_file_of_the_rendezvous(as_member, as_nobody, path):
    address = as_member(ALICE, begin, path, 0o600)
    assert "mode" not in address
    assert os.stat(f"{path}.round-0-0").st_mode & 0o777 == 0o700
    with pytest.raises(StoreUnavailableError, match="Permission denied"):
        as_nobody(lambda: open_store(address).close())


def test_room_that_can_not_have_the_group_says_so(as_member, public_dir):
    path = str(public_dir / "job")
    as_member(ALICE, lambda: job(path).close())
    os.chown(path, -1, GROUP + 1)

    def begin_with_words():
        words = logging.handlers.BufferingHandler(100)
        logging.getLogger("fscoord").addHandler(words)
        with job(path) as store, RoundStore(store, "0-0", is_first=True):
            return [record.getMessage() for record in words.buffer]

    (said,) = as_member(ALICE, begin_with_words)
    assert said.startswith(f"{path}.round-0-0 can't have the group {GROUP + 1} of the rendezvous's file (")


def test_room_has_the_lock_and_coherence_options_of_the_rendezvous(tmp_path):
    with FileStore(tmp_path / "job", lock="soft", coherence="local") as store:
        with RoundStore(store, "0-0", is_first=True) as room:
            assert room.address == f"file://{tmp_path}/job.round-0-0/store?lock=soft&coherence=local"
            open_store(room.address).close()
        assert not os.path.exists(f"{tmp_path}/job.round-0-0")


def test_room_is_made_and_removed_by_the_first_node_alone(tmp_path):
    with FileStore(tmp_path / "job") as store:
        with RoundStore(store, "0-0", is_first=False):
            assert not os.path.exists(f"{tmp_path}/job.round-0-0")
        with RoundStore(store, "0-0", is_first=True), RoundStore(store, "0-0", is_first=False):
            pass
        assert not os.path.exists(f"{tmp_path}/job.round-0-0")


def test_room_of_a_store_without_a_place_has_no_address():
    with RoundStore(HashStore(), "0-0", is_first=True) as room:
        assert room.address == ""
