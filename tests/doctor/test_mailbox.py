"""The mailbox: its coordinator, its messages, and its removal."""

from __future__ import annotations

import os
import stat

import pytest
from support.internals import Mount

from fscoord import InsecurePathError
from fscoord.doctor import mailbox
from fscoord.doctor.mailbox import Mailbox


@pytest.fixture
def directory(tmp_path) -> str:
    return str(tmp_path / "place")


def test_mailbox_is_presided_by_the_first_and_passes_whole_messages(directory):
    one, other = Mailbox(directory, "one"), Mailbox(directory, "other")
    assert one.enter({"host": "a"})
    assert not other.enter({"host": "b"})
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    assert {"here.one", "here.other"} <= set(one.listing())
    assert one.fetch("here.other") == {"host": "b"}
    other.publish("x", [1])
    assert "x" in one.wait(["x"], [], 30)
    other.leave()
    assert "left.other" in one.listing()
    one.leave()
    assert not os.path.exists(directory)
    assert other.listing() == []


def test_presiding_instance_alone_renews_its_sign_of_life(directory, monkeypatch):
    one, other = Mailbox(directory, "one"), Mailbox(directory, "other")
    one.enter({})
    other.enter({})
    other.listing()
    assert not [name for name in other.listing() if name.startswith("beat")]
    assert "beat.1" in one.listing()
    monkeypatch.setattr(mailbox, "BEAT_S", 0.0)
    assert [name for name in one.listing() if name.startswith("beat")] == ["beat.2"]
    one.leave()


@pytest.mark.parametrize(("kind", "changes"), [("nfs4", 1), ("fuse.ceph-fuse", 0), ("ceph", 0)])
def test_listing_changes_the_directory_first_but_not_on_ceph(kind, changes, directory, monkeypatch):
    monkeypatch.setattr(mailbox, "find_mount", lambda _: Mount(kind, "/", ()))
    one, other = Mailbox(directory, "one"), Mailbox(directory, "other")
    one.enter({})
    other.enter({})
    made = []
    monkeypatch.setattr(mailbox, "new_file", lambda path, *_: made.append(path) or os.open(path, os.O_CREAT))
    assert "here.one" in other.listing()
    assert len(made) == changes
    one.leave()


def test_wait_ends_when_the_place_is_gone_but_not_at_a_known_name(directory):
    one = Mailbox(directory, "one")
    one.enter({})
    assert "here.one" in one.wait(["here."], ["here.one"], 0)
    one.leave()
    assert one.wait(["here."], [], 30) == []


def test_instance_alone_that_does_not_preside_removes_the_place(directory):
    one, chair = Mailbox(directory, "one"), os.path.join(directory, "chair")
    os.makedirs(chair)
    os.chmod(directory, 0o700)
    assert not one.enter({})
    os.rmdir(chair)
    one.leave()
    assert not os.path.exists(directory)


def test_files_of_a_dead_instance_are_put_aside_as_a_whole(directory):
    dead = Mailbox(directory, "dead")
    dead.enter({})
    os.mkdir(os.path.join(directory, "file"))
    others = [Mailbox(directory, name) for name in ("next", "another")]
    for other in others:
        other.enter({})
    for other in others:
        other.put_aside()
        assert os.listdir(os.path.dirname(directory)) == []


def test_link_or_file_or_directory_writable_by_others_is_refused(directory, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", directory)
    with pytest.raises(InsecurePathError):
        Mailbox(directory, "one").enter({})
    os.unlink(directory)
    os.mkdir(directory)
    os.chmod(directory, 0o777)
    with pytest.raises(InsecurePathError):
        Mailbox(directory, "one").enter({})
    assert os.listdir(directory) == []
    assert os.listdir(tmp_path / "elsewhere") == []
