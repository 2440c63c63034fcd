"""ps and top: what every participant does now, with real processes: a dead rank, a stopped one, a deadlock."""

from __future__ import annotations

import codecs
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from support.internals import log_of, timing
from support.places import until, wait_in_vain

from fscoord import FileStore, HashStore, barrier
from fscoord.errors import StoreUnavailableError
from fscoord.recipes import Lock, Queue, Semaphore
from fscoord.status import reading, status
from fscoord.status.findings import clock_text
from fscoord.stores.file import observer

HANG_S = 60
WORKER = """
import sys, time
from fscoord import FileStore, barrier
from fscoord._waiting import timing
from fscoord.recipes import Lock
timing.SHOW_S = 0.02
path, rank, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
store = FileStore(path, rank=rank, label=f"worker {rank}", timeout=60)
if what == "barrier":
    barrier(store, 3, "epoch 7", 60, rank)
elif what == "idle":
    print("ready", flush=True)
    sys.stdin.read()
elif what == "lock":
    Lock(store, sys.argv[4]).acquire()
    print("ready", flush=True)
    sys.stdin.readline()
    Lock(store, sys.argv[5]).acquire(timeout=60)
elif what == "hold":
    def stop(_, __):
        import os, signal
        os.kill(os.getpid(), signal.SIGSTOP)
        return None, 0, b""
    store._log.update(0, b"", b"", stop, 60)
"""

WAITER = """
import sys
from fscoord import FileStore
from fscoord._waiting import timing
from fscoord.recipes import Event
timing.SHOW_S = 0.02
store = FileStore(sys.argv[1])
"""


@pytest.fixture
def worker(path: str) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Give `worker(rank, what, *words)`: a process that is a rank; at the end it is killed and reaped."""
    started = []

    def start(rank: int, what: str, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", WORKER, path, str(rank), what, *words]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(child)
        if what in ("idle", "lock"):
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate(timeout=HANG_S)


def waits(path: str, *ranks: int) -> bool:
    seen = {each.rank for each in status(path).picture.participants if each.waiting is not None}
    return seen.issuperset(ranks)


@pytest.fixture(autouse=True)
def _store(path: str) -> Iterator[None]:
    with FileStore(path):
        yield


def table(out: bytes) -> list[list[str]]:
    """Return the cells of the table in what ps prints."""
    lines = out.decode().splitlines()
    (head,) = [place for place, line in enumerate(lines) if line.startswith("RANK")]
    return [re.split(r"  +", line.strip()) for line in lines[head:]]


def test_rank_that_has_ended_is_named_by_ps(fscoord, worker, path):
    for rank in (0, 1):
        worker(rank, "barrier")
    killed = worker(2, "idle")
    until(lambda: waits(path, 0, 1))
    killed.kill()
    killed.wait(HANG_S)
    done = fscoord("ps")
    assert done.code == 1
    text = done.out.decode()
    assert re.match(
        r"BARRIER: barrier 'epoch 7': 2 of 3 came, and the first has waited for \S+ s\. Missing: 2 \(", text
    )
    assert f"(rank 2 ({os.uname().nodename}:{killed.pid}) has ended). Start rank 2 again" in text.splitlines()[0]
    rows = table(done.out)
    assert rows[0] == ["RANK", "LABEL", "PROCESS", "STATE", "SINCE", "WAITS FOR"]
    assert [row[0] for row in rows[1:]] == ["0", "1", "2"]
    assert rows[1][1] == "worker 0"
    assert re.fullmatch(r"barrier 'epoch 7' for \S+ s", rows[1][5])
    assert rows[3][3] == "ended"


@pytest.mark.parametrize(
    ("wait", "words"),
    [
        ("Event(store, 'plan').wait()", "event 'plan'"),
        ("next(store.watch('plan/'))", "a change of a key that begins with 'plan/'"),
    ],
)
def test_process_that_has_written_nothing_is_shown_by_ps_as_soon_as_it_has_waited(fscoord, path, wait, words):
    with FileStore(path) as first:
        wait_in_vain(first)  # the first wait of a log writes
    waiter = subprocess.Popen([sys.executable, "-c", WAITER + wait, path])
    try:
        until(lambda: any(each.waiting for each in status(path).picture.participants))
        done = fscoord("ps")
        assert done.code == 0
        head, *rows = table(done.out)
        cells = next(row for row in rows if row[head.index("PROCESS")] == f"{os.uname().nodename}:{waiter.pid}")
        assert re.fullmatch(rf"{re.escape(words)} for \S+ s", cells[-1])
    finally:
        waiter.kill()
        waiter.wait(HANG_S)


def test_stopped_rank_is_named_by_ps_with_the_remedy(fscoord, worker, path):
    for rank in (0, 1):
        worker(rank, "barrier")
    stopped = worker(2, "idle")
    until(lambda: waits(path, 0, 1))
    stopped.send_signal(signal.SIGSTOP)
    until(lambda: any(each.is_stopped for each in status(path).picture.participants))
    done = fscoord("ps")
    assert done.code == 1
    first = done.out.decode().splitlines()[0]
    assert f"(rank 2 ({os.uname().nodename}:{stopped.pid}) is stopped)" in first
    assert first.endswith(f"(kill -CONT {stopped.pid}) or kill it")
    assert table(done.out)[3][3] == "stopped"


def test_deadlock_of_two_locks_is_spelled_out_by_ps(fscoord, worker, path):
    one, two = worker(0, "lock", "a", "b"), worker(1, "lock", "b", "a")
    for child in (one, two):
        child.stdin.write(b"\n")
        child.stdin.flush()
    until(lambda: waits(path, 0, 1))
    done = fscoord("ps")
    assert done.code == 1
    first = done.out.decode().splitlines()[0]
    assert first.startswith(
        "DEADLOCK: rank 0 waits for lock 'b', which rank 1 holds; rank 1 waits for lock 'a', which rank 0 holds. "
    )
    rows = table(done.out)
    assert rows[1][5] == "lock 'a'"
    assert re.fullmatch(r"lock 'b', 2nd in line for \S+ s", rows[1][6])


def test_store_whose_log_is_locked_by_a_stopped_process_is_shown(fscoord, worker, path):
    holder = worker(0, "hold")
    until(lambda: status(path).picture.log_lock)
    until(lambda: any(each.is_stopped for each in status(path).picture.participants))
    done = fscoord("ps")
    assert done.code == 1
    assert done.out.decode().splitlines()[0] == (
        f"LOG-LOCK: rank 0 ({os.uname().nodename}:{holder.pid}) is stopped and holds the lock of the store's log: no"
        f" process can write. Continue it (kill -CONT {holder.pid}) or kill it"
    )
    assert table(done.out)[1][3] == "stopped"
    holder.send_signal(signal.SIGCONT)
    assert holder.wait(HANG_S) == 0
    assert fscoord("ps").code == 0


def test_holder_of_the_log_that_has_not_written_is_named(fscoord, path, monkeypatch):
    monkeypatch.setattr(observer, "HOLDER_S", HANG_S)
    with FileStore(path, read_only=False) as store:
        code = (
            "import fcntl, struct, sys; f = open(sys.argv[1], 'r+b')\n"
            "fcntl.fcntl(f, fcntl.F_OFD_SETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 1 << 62, 1, 0))\n"
            "print('ready', flush=True); sys.stdin.read()"
        )
        store.set("k", "v")
        child = subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert child.stdout.readline() == b"ready\n"
            first = fscoord("ps").out.decode().splitlines()[0]
            assert first.startswith(f"LOG-LOCK: {os.uname().nodename}:{child.pid} has held the lock of the store's log")
        finally:
            child.communicate(timeout=HANG_S)


def test_ps_of_a_store_in_order_exits_with_0(fscoord, path):
    with FileStore(path, rank=3, label="a b\n") as store, FileStore(path, rank=4) as other:
        Lock(store, "dataset").acquire()
        queue = Queue(other, "work")
        queue.put_all(["1", "2"])
        items = [queue.take(), queue.take()]
        done = fscoord("ps")
        assert (done.code, done.err) == (0, "")
        rows = table(done.out)
        assert rows[1][:2] == ["3", "a b\\n"]
        assert "lock 'dataset'" in rows[1]
        assert "2 items of queue 'work'" in rows[2]
        for item in items:
            item.ack()


def test_row_of_ps_names_three_holds_and_counts_the_others(fscoord, path):
    with FileStore(path, rank=0) as store:
        for number in range(5):
            Lock(store, f"shard/{number}").acquire()
        assert table(fscoord("ps").out)[1][4] == "lock 'shard/0', lock 'shard/1', lock 'shard/2' and 2 more"
        assert len(json.loads(fscoord("ps", "--json").out)["participants"][-1]["holds"]) == 5


def test_wide_characters_of_a_label_keep_the_columns_of_ps_in_line(fscoord, path):
    with FileStore(path, rank=0, label="日本語"), FileStore(path, rank=1, label="e\u0301te\u0301"):
        head, *rows = fscoord("ps").out.decode().splitlines()
    place = head.index("PROCESS")
    # Three wide characters take three columns more than their number, and two combining ones two columns less.
    assert [row.index(os.uname().nodename) for row in rows] == [place - 3, place + 2]


def test_ended_sessions_are_shown_only_with_all(fscoord, path):
    for _ in range(3):
        FileStore(path, label="gone").close()
    assert fscoord("ps").out == b"no process has this store open now\n"
    assert len(table(fscoord("ps", "--all").out)) == 4


def test_state_of_a_session_has_the_same_word_in_ps_members_and_holders(fscoord, path):
    with FileStore(path, rank=0) as store, FileStore(path, rank=1) as dead, FileStore(path, rank=2) as ended:
        slots = [Semaphore(each, "s", 3) for each in (store, ended)]
        assert all(slot.acquire() for slot in slots)
        dead.close()
        assert store.dead_ranks([1]) == [1]
        ended.close()
        found = next(each.found_dead for each in status(path).picture.participants if each.rank == 1)
        words = ["alive", f"dead, found {clock_text(found)}", "ended"]
        assert [row[2] for row in table(fscoord("ps", "--all").out)[1:4]] == words
        assert [row[3] for row in table(fscoord("members").out)[1:4]] == words
        assert [line.split()[2] for line in fscoord("holders", "s").out.decode().splitlines()[1:]] == ["alive", "ended"]
        told = json.loads(fscoord("ps", "--json").out)["participants"]
        assert [(each["alive"], each["found_dead"]) for each in told if each["rank"] in (1, 2)] == [
            ("no", found),
            ("no", None),
        ]


def test_clones_of_a_handle_are_one_row(fscoord, path):
    with FileStore(path, rank=1) as store, store.clone() as clone:
        clone.set("k", "v")
        assert len(store.members()) == 2
        assert len(table(fscoord("ps").out)) == 2


@pytest.mark.parametrize("verb", ["ps", "members", "dump", "verify", "compact"])
def test_verb_that_looks_into_a_store_takes_it_as_an_argument(fscoord, path, verb, monkeypatch):
    FileStore(path, rank=0).close()
    by_environment = fscoord(verb)
    monkeypatch.delenv("FSCOORD_STORE")
    assert by_environment.code == 0
    assert fscoord(verb, path) == fscoord(verb, f"file:{path}") == fscoord(verb, "--store", path) == by_environment


@pytest.mark.parametrize(
    "words", [["ps"], ["top", "-n", "1"], ["verify"], ["repair", "-o", "new"], ["members"], ["dump"], ["compact"]]
)
def test_verb_that_is_given_two_stores_is_a_usage_error(fscoord, path, words):
    done = fscoord("--store", "other", *words, path)
    assert (done.code, done.out) == (64, b"")
    assert f"The argument names {path}, and --store names other; give one" in done.err
    assert fscoord(words[0], *words[1:], path, "--store", "other").code == 64


@pytest.mark.parametrize("words", [["ps"], ["top"]])
def test_timeout_of_ps_and_top_is_the_limit_for_a_server(fscoord, monkeypatch, words):
    given = []

    def refuse(url: str, **options: object) -> None:
        given.append((url, options))
        raise StoreUnavailableError("no server")

    monkeypatch.setattr(reading, "open_store", refuse)
    assert fscoord(*words, "--timeout", "1.5", "tcp://head:1").code == 74
    assert fscoord(*words, "tcp://head:1").code == 74
    assert given == [("tcp://head:1", {"timeout": 1.5}), ("tcp://head:1", {})]


@pytest.mark.parametrize("lock", ["flock", "soft"])
def test_ps_finds_out_the_kind_of_lock_and_its_holder(fscoord, process, tmp_path, lock):
    path = str(tmp_path / lock)
    with FileStore(path, rank=0, lock=lock) as store:
        assert fscoord("ps", path).code == 0
        seen = []

        def look(*_: object) -> tuple[None, int, bytes]:
            seen.append(process("ps", path).communicate(timeout=HANG_S)[0].decode())
            return None, 0, b""

        log_of(store).update(0, b"", b"", look, HANG_S)
    assert f"LOG-LOCK: rank 0 ({os.uname().nodename}:{os.getpid()}) has held the lock" in seen[0]


def test_store_that_is_not_there_is_an_error_of_ps(fscoord, tmp_path):
    done = fscoord("ps", str(tmp_path / "nothing"))
    assert (done.code, done.out) == (74, b"")
    assert not os.path.exists(tmp_path / "nothing")


def test_ps_prints_json(fscoord, path, monkeypatch):
    monkeypatch.setattr(timing, "SHOW_S", 0.02)
    with FileStore(path, rank=0) as store, FileStore(path, rank=1):
        from support.places import start_thread

        with FileStore(path) as other, start_thread(barrier, store, 2, "b", HANG_S, 0):
            until(lambda: waits(path, 0))
            found = json.loads(fscoord("ps", "--json", "--slow", "0").out)
            barrier(other, 2, "b", HANG_S, 1)
    assert found["findings"][0]["kind"] == "barrier"
    assert found["barriers"] == [{"name": "b", "world_size": 2, "count": 1, "missing": [1]}]
    first = found["participants"][0]
    assert (first["rank"], first["alive"], first["waiting"]["words"]) == (0, "yes", "barrier 'b'")
    assert found["log_lock"] is None


def test_ps_watches_until_it_is_interrupted(process, path):
    with FileStore(path, rank=5):
        child = process("ps", "--watch", "--interval", "0.01")
        heads = 0
        while heads < 3:
            heads += child.stdout.readline().startswith(b"RANK")
        child.send_signal(signal.SIGINT)
        assert child.wait(HANG_S) == 130


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user and to mount")
def test_look_needs_only_the_right_to_read(path, tmp_path):
    import portalocker.portalocker  # noqa: F401 - the child may not be able to read it
    import watchdog.observers.inotify_c  # noqa: F401

    codecs.lookup("ascii")
    place = Path("/tmp") / f"fscoord-ps-{os.getpid()}"
    place.mkdir()
    try:
        os.chown(place, 0, 2100)
        place.chmod(0o750)
        shared = str(place / "store")
        with FileStore(shared, rank=0, mode=0o660, timeout=HANG_S) as store, Lock(store, "l"):
            for file in place.iterdir():
                os.chown(file, 0, 2100)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    os.setgroups([2100])
                    os.setresgid(3001, 3001, 3001)
                    os.setresuid(2001, 2001, 2001)
                    seen = status(shared).picture
                    holds = [each.holds for each in seen.participants if each.rank == 0 and each.alive == "yes"]
                    code = 0 if holds == [("lock 'l'",)] and not seen.notes else 2
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            mount = tmp_path / "ro"
            mount.mkdir()
            subprocess.run(["mount", "--bind", str(place), str(mount)], check=True)
            try:
                subprocess.run(["mount", "-o", "remount,ro,bind", str(mount)], check=True)
                (first,) = status(str(mount / "store")).picture.participants
                assert (first.alive, first.holds) == ("yes", ("lock 'l'",))
            finally:
                subprocess.run(["umount", str(mount)], check=True)
    finally:
        for file in place.iterdir():
            file.unlink()
        place.rmdir()


# -- top ---------------------------------------------------------------------------------------------------------------


def test_barrier_of_ranks_and_one_of_callers_are_each_counted_once_by_top(path):
    with FileStore(path, rank=0) as first, FileStore(path, rank=1) as second, ThreadPoolExecutor(2) as pool:
        for meet in (lambda rank, store: barrier(store, 2, "a", HANG_S, rank), lambda _, store: store.barrier("b", 2)):
            assert list(pool.map(meet, (0, 1), (first, second))) == [None, None]
        with closing(observer.FileObserver(path, {}, lambda _: False)) as seen:
            assert seen.look().barriers == 2


def test_top_prints_a_line_for_each_look_where_there_is_no_terminal(fscoord, path):
    with FileStore(path, rank=0) as store:
        store.set("k", "v")
        done = fscoord("top", "--count", "2", "--interval", "0.01")
    assert (done.code, done.err) == (0, "")
    lines = done.out.decode().splitlines()
    assert len(lines) == 2
    line = r"\d\d:\d\d:\d\d UTC: 1 here, 0 wait; 0 records/s; 0 barriers/s; log \d+ bytes; 0 compactions"
    assert all(re.fullmatch(line, each) for each in lines)


class Terminal:
    """A program in a terminal of its own, as far as a test looks at it."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-m", "fscoord", *words], environment)
        self.text = ""
        self.code: int | None = None

    def until(self, words: str) -> None:
        """Read until `words` have come."""
        end = time.monotonic() + HANG_S
        while words not in self.text:
            left = end - time.monotonic()
            assert left > 0, self.text[-2000:]
            if select.select([self._fd], [], [], left)[0]:
                self.text += os.read(self._fd, 1 << 16).decode(errors="replace")

    def press(self, key: str) -> None:
        self.text = ""
        os.write(self._fd, key.encode())

    def end(self) -> int:
        """Return the exit code."""
        while True:
            try:
                if not os.read(self._fd, 1 << 16):
                    break
            except OSError:
                break
        os.close(self._fd)
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code


@pytest.fixture
def terminal(path: str) -> Iterator[Terminal]:
    """Give the verb top in a terminal of its own, on the store at `path`."""
    settings = {**os.environ, "FSCOORD_STORE": path, "COLUMNS": "120", "LINES": "30", "TERM": "xterm"}
    terminal = Terminal(["top", "--interval", "0.2"], settings)
    yield terminal
    if terminal.code is None:
        os.kill(terminal.pid, signal.SIGKILL)
        terminal.end()


def test_top_sorts_pauses_and_quits_by_keys_in_a_terminal(terminal, path):
    with FileStore(path, rank=7, label="the seventh"):
        terminal.until("the seventh")
        assert "by wait" in terminal.text
        terminal.press("s")
        terminal.until("by rank")
        terminal.press("s")
        terminal.until("by rate")
        terminal.press("p")
        terminal.until("[paused]")
        terminal.press("p")
        terminal.until("by rate")
        assert "[paused]" not in terminal.text
        terminal.press("q")
        assert terminal.end() == 0


@pytest.mark.parametrize("words", [["top"], ["ps", "--watch"]])
def test_dumb_terminal_gets_lines_without_escape_sequences(path, words):
    with FileStore(path, rank=7, label="the seventh"):
        settings = {**os.environ, "FSCOORD_STORE": path, "TERM": "dumb"}
        terminal = Terminal([*words, "--interval", "0.01"], settings)
        terminal.until(" here" if words[0] == "top" else "the seventh")
        os.kill(terminal.pid, signal.SIGINT)
        assert terminal.end() in (0, 130)
        assert "\x1b" not in terminal.text


def test_ps_of_a_store_in_memory_says_what_is_missing(fscoord):
    done = fscoord("ps", "mem:")
    assert done.code == 0
    assert "note: this kind of store has no sessions" in done.out.decode()
    with HashStore() as store:
        assert status(store).findings == ()
