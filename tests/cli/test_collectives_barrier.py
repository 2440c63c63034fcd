"""The verb barrier: ranks that arrive, that are missing, and that arrive twice."""

from __future__ import annotations

from fscoord import FileStore, barrier


def test_barrier_is_passed_when_all_ranks_have_come(process, line_with, path):
    child = process("barrier", "-v", "-n", "2", "--rank", "1", "start")
    line_with(child, "waiting at barrier 'start'")
    with FileStore(path) as store:
        barrier(store, 2, "start", rank=0)
    assert child.wait() == 0


def test_barrier_without_ranks_is_the_barrier_of_the_store(process, line_with, path):
    child = process("barrier", "-v", "-n", "2", "start")
    line_with(child, "waiting at barrier 'start'")
    with FileStore(path) as store:
        store.barrier("start", 2)
    assert child.wait() == 0


def test_barrier_says_on_a_terminal_what_it_waits_for_and_how_long(fscoord):
    done = fscoord("barrier", "-n", "1", "--timeout", "9", "a b", person=True)
    assert done == (0, b"", "fscoord: waiting at barrier 'a b' until 1 process has arrived, up to 9 s\n")
    done = fscoord("barrier", "-n", "1", "--rank", "0", "--timeout", "inf", "b", person=True)
    assert done.err == "fscoord: waiting at barrier 'b' as rank 0 until 1 process has arrived, without a time limit\n"
    done = fscoord("barrier", "-n", "2", "--timeout", "0", "c", person=True)
    assert "until 2 processes have arrived" in done.err


def test_timeout_names_the_missing_ranks(fscoord):
    result = fscoord("barrier", "-n", "4", "--rank", "1", "--timeout", "0", "start")
    assert (result.code, result.out) == (75, b"")
    assert "missing_ranks=[0, 2, 3]" in result.err


def test_rank_that_comes_again_counts_once(fscoord):
    for _ in range(3):
        assert fscoord("barrier", "-n", "2", "--rank", "1", "--timeout", "0", "start").code == 75
    assert fscoord("barrier", "-n", "2", "--rank", "0", "start") == (0, b"", "")


def test_barrier_that_is_finished_is_not_used_again(fscoord):
    assert fscoord("barrier", "-n", "1", "start").code == 0
    result = fscoord("barrier", "-n", "1", "start")
    assert result.code == 64
    assert "used before" in result.err


def test_rank_outside_the_world_is_refused(fscoord):
    assert fscoord("barrier", "-n", "2", "--rank", "2", "start").code == 64
    assert fscoord("barrier", "-n", "0", "start").code == 64
    assert fscoord("barrier", "start").code == 64
