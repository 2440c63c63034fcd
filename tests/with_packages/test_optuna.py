"""The journal of Optuna in a store: Optuna's own tests, kills at any byte and call, reads, snapshots, packing."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.testing.pytest_storages import StorageTestCase
from optuna.trial import TrialState
from pages import blocks
from support.torch_lacks import LACKS
from with_packages.optuna_processes import Worker, entry, in_child, numbers

import fscoord
from fscoord import FileStore, HashStore, PrefixStore, StoreError
from fscoord.errors import LimitExceededError, StoreUnavailableError
from fscoord.integrations import optuna as integration
from fscoord.integrations.optuna import FscoordJournalBackend, FscoordJournalStorage
from fscoord.testing import FaultyStore

pytestmark = [pytest.mark.packages, pytest.mark.timeout(240)]

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "optuna.md"

optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> int:
    """Segments of about ten entries, and the length from which they are sealed."""
    monkeypatch.setattr(integration, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(integration, "NEAR", 20)
    return integration.SEGMENT_BYTES


@pytest.fixture
def opened() -> Iterator[Callable[..., FscoordJournalBackend]]:
    """Give `opened(...)`: a backend that is closed at the end."""
    backends: list[FscoordJournalBackend] = []

    def open_backend(*arguments: Any, **options: Any) -> FscoordJournalBackend:
        backends.append(FscoordJournalBackend(*arguments, **options))
        return backends[-1]

    yield open_backend
    for backend in backends:
        backend.close()


HANG_S = 60

SERVER = """
import os, sys
from fscoord import TCPStore
with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as server:
    print(server.port, flush=True)
    sys.stdin.read()
os._exit(0)  # torch rarely hangs at the end of a process that has served
"""


@pytest.fixture(scope="module", autouse=True)
def tcp_address() -> Iterator[str]:
    """One server for all tests, in a process of its own: it may close connections after the end of a test."""
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield f"tcp://127.0.0.1:{int(server.stdout.readline())}"
        server.communicate("", timeout=HANG_S)


# -- Optuna's own tests ------------------------------------------------------------------------------------------------


class TestOptunasOwnTests(StorageTestCase):
    """All that Optuna asks of a storage, also with segments of a few entries, and a snapshot for each trial."""

    @pytest.fixture(params=["file", "deaths", "durable", "short", "memory", "tcp"])
    def storage(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[JournalStorage]:
        if request.param == "short":
            monkeypatch.setattr(integration, "SEGMENT_BYTES", 300)
            monkeypatch.setattr(optuna.storages.journal._storage, "SNAPSHOT_INTERVAL", 1)
        address = str(tmp_path / "journal")
        options: dict[str, Any] = {}
        if request.param == "durable":
            options = {"durable": True}
        elif request.param == "memory":
            address = f"mem:{request.node.name}"
        elif request.param == "tcp":
            address, options = request.getfixturevalue("tcp_address"), {"prefix": request.node.name}
            with fscoord.open_store(address) as store:
                try:
                    store.list_keys()
                except StoreError as error:
                    pytest.skip(f"{LACKS}TCPStore.list_keys, which the journal calls: {error}")
        reopened: list[FscoordJournalBackend] = []

        def reopen(*arguments: Any, **named: Any) -> FscoordJournalBackend:
            reopened.append(FscoordJournalBackend(*arguments, **named))
            return reopened[-1]

        with FscoordJournalBackend(address, **options) as backend:
            made = FscoordJournalStorage(backend) if request.param == "deaths" else JournalStorage(backend)
            monkeypatch.setattr(integration, "FscoordJournalBackend", reopen)  # what is unpickled, to be closed
            yield made
        for other in reopened:
            other.close()


def test_identical_entries_of_many_threads_are_all_kept(
    opened: Callable[..., FscoordJournalBackend], tmp_path: Path, short_segments: int
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    backend = opened(tmp_path / "journal")
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(backend.append_logs, [[entry(7)]] * 200))
    assert numbers(backend) == [7] * 200


def test_trials_that_wait_are_each_taken_by_one_process(tmp_path: Path) -> None:
    address = str(tmp_path / "journal")
    with FscoordJournalBackend(address) as backend:
        study = optuna.create_study(study_name="s", storage=JournalStorage(backend))
        for number in range(12):
            study.enqueue_trial({"x": number})
    workers = [Worker(address, asks=3) for _ in range(4)]
    taken = [line for worker in workers for line in worker.read_until(3)]
    for worker in workers:
        worker.kill()
    assert sorted(int(line.split()[1]) for line in taken) == list(range(12))


# -- processes that are killed -----------------------------------------------------------------------------------------


def test_study_of_processes_that_are_killed_loses_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random, scale: Callable[[int], int]
) -> None:
    """Eight at a time, in segments of a few entries, with a snapshot every ten trials, so that all this is hit, too."""
    monkeypatch.setattr(integration, "SEGMENT_BYTES", 2000)
    monkeypatch.setattr(optuna.storages.journal._storage, "SNAPSHOT_INTERVAL", 10)
    address = str(tmp_path / "journal")
    with FscoordJournalBackend(address) as backend:
        optuna.create_study(study_name="s", storage=JournalStorage(backend))
    asked, told = [], {}

    def note(lines: list[str]) -> None:
        for line in lines:
            what, number, *value = line.split()
            if what == "asked":
                asked.append(int(number))
            else:
                told[int(number)] = float(value[0])

    workers = [Worker(address) for _ in range(8)]
    for _ in range(scale(30)):
        place = rng.randrange(8)
        note(workers[place].read_until(rng.randrange(1, 12)))
        note(workers[place].kill())
        workers[place] = Worker(address)
    for worker in workers:
        note(worker.kill())

    with FscoordJournalBackend(address) as backend:
        storage = JournalStorage(backend)
        trials = storage.get_all_trials(0)
        whole = JournalStorage(FscoordJournalBackend(address, snapshots=False))
        assert whole.get_all_trials(0) == trials, "the snapshot and the whole journal say the same"
        whole._backend.close()
        # The next trial works, and has the next number.
        study = optuna.load_study(study_name="s", storage=storage)
        assert study.ask().number == len(trials)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert len(set(asked)) == len(asked), "no trial was given to two processes"
    assert len(told) > 40
    by_number = {trial.number: trial for trial in trials}
    assert set(asked) <= by_number.keys()
    lost = [n for n, x in told.items() if by_number[n].state != TrialState.COMPLETE or by_number[n].value != x]
    assert lost == []


@pytest.mark.parametrize(("segment_bytes", "least"), [(65536, 12), (1, 20)], ids=["append", "seal_and_pack"])
def test_append_that_is_killed_before_any_call_is_whole_or_absent(segment_bytes: int, least: int, memory: Path) -> None:
    assert kill_everywhere("before", segment_bytes, 1, memory) > least


@pytest.mark.parametrize(
    ("segment_bytes", "stride", "least"), [(65536, 1, 300), (1, 5, 600)], ids=["append", "seal_and_pack"]
)
def test_append_that_is_cut_at_any_byte_harms_no_other(
    segment_bytes: int, stride: int, least: int, memory: Path
) -> None:
    """Of all that the call writes, the session of its handle first."""
    assert kill_everywhere("cut", segment_bytes, stride, memory) > least


def kill_everywhere(how: str, segment_bytes: int, stride: int, directory: Path) -> int:
    """Run `optuna_kills`, and return where it ended. The process is a small one, because it forks hundreds of times."""
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "with_packages.optuna_kills", how, str(segment_bytes), str(stride), str(directory)],
        cwd=directory,  # where no other fscoord is
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(fscoord.__file__).parent.parent), str(tests)])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


# -- the order of writers ----------------------------------------------------------------------------------------------


def test_writer_whose_segment_was_packed_meanwhile_writes_to_the_next(
    opened: Callable[..., FscoordJournalBackend], tmp_path: Path, short_segments: int
) -> None:
    path = tmp_path / "journal"
    slow, fast = opened(path), opened(path)
    slow.append_logs([entry(0)])
    for number in range(1, 30):
        fast.append_logs([entry(number)])
    slow.append_logs([entry(30)])  # it knows of the first segment only
    fast.append_logs([entry(31)])
    for backend in (slow, fast, opened(path)):
        assert numbers(backend) == list(range(32))
    first = fast._store.get("optuna/log/" + "0" * 20)
    assert first.startswith(integration.PACKED)
    assert b'"n":30' in first, "the line that came too late, which does not count"


class Meanwhile(FaultyStore):
    """Does something after each append that succeeded, before its caller goes on."""

    then: Callable[[], None] = staticmethod(lambda: None)

    def append(self, key: Any, value: Any) -> None:
        super().append(key, value)
        self.then()


def test_line_that_is_packed_before_its_writer_looks_counts_once(
    opened: Callable[..., FscoordJournalBackend], short_segments: int
) -> None:
    inner = HashStore()
    store = Meanwhile(inner)
    slow, fast = opened(store), opened(inner)

    def others() -> None:
        store.then = lambda: None
        for number in range(1, 20):
            fast.append_logs([entry(number)])

    store.then = others
    slow.append_logs([entry(0)])
    assert numbers(opened(inner)) == list(range(20))
    slow.append_logs([entry(20)])
    assert numbers(opened(inner)) == list(range(21))
    inner.close()


def test_writer_that_cannot_look_says_that_its_entries_may_be_there(
    opened: Callable[..., FscoordJournalBackend],
) -> None:
    inner = HashStore()
    store = FaultyStore(inner)
    backend = opened(store)
    with store.fails("get"), pytest.raises(StoreUnavailableError) as caught:
        backend.append_logs([entry(0)])
    assert caught.value.maybe_applied
    backend.append_logs([entry(1)])
    assert numbers(backend) == [0, 1]
    inner.close()


def test_writer_is_told_of_no_failure_once_its_entries_are_written(
    opened: Callable[..., FscoordJournalBackend], short_segments: int, caplog: pytest.LogCaptureFixture
) -> None:
    inner = HashStore()
    store = FaultyStore(inner)
    backend = opened(store)
    line = [entry(each) for each in range(20)]
    with store.fails("append", after=1), caplog.at_level(logging.WARNING, "fscoord"):
        backend.append_logs(line)
    assert "was not sealed" in caplog.text
    for _ in range(2):
        backend.append_logs(line)
    assert numbers(backend) == list(range(20)) * 3
    assert [len(inner.get(key)) < 1000 for key in inner.list_keys()] == [True, True], "the next call has sealed it"
    inner.close()


# -- reads -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries were decoded, call by call."""
    counts: list[int] = []

    def loads(text: bytes) -> Any:
        found = json.loads(text)
        counts.append(len(found))
        return found

    monkeypatch.setattr(integration, "json", SimpleNamespace(loads=loads, dumps=json.dumps))
    return counts


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first entries of the lines that were read, or passed over."""
    firsts: list[int] = []
    make = integration._Line

    def new_line(first: int, size: int, *rest: Any) -> Any:
        firsts.extend([first] * bool(size))
        return make(first, size, *rest)

    monkeypatch.setattr(integration, "_Line", new_line)
    return firsts


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of stores in memory."""
    calls: list[str] = []

    def count(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: HashStore, *arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return real(self, *arguments, **named)

        return call

    for name in ("get", "check", "list_keys"):
        monkeypatch.setattr(HashStore, name, count(name, getattr(HashStore, name)))
    return calls


def test_reader_decodes_only_entries_that_are_new(
    opened: Callable[..., FscoordJournalBackend],
    short_segments: int,
    decoded: list[int],
    walked: list[int],
    asked: list[str],
) -> None:
    store = HashStore()
    writer, reader = opened(store), opened(store)
    for number in range(100):
        writer.append_logs([entry(number)])
    assert numbers(reader) == list(range(100))
    assert sum(decoded) == 100
    for number in range(100, 130):
        writer.append_logs([entry(number)])
        for counts in (decoded, walked, asked):
            counts.clear()
        assert numbers(reader, number) == [number]
        assert decoded == [1]
        assert walked == [number]
        assert asked.count("get") <= 2
        assert "list_keys" not in asked
    decoded.clear()
    asked.clear()
    assert numbers(reader, 130) == []
    assert decoded == []
    assert asked in (["get"], ["check"])
    store.close()


def test_new_reader_begins_in_the_segment_that_it_needs(
    opened: Callable[..., FscoordJournalBackend], short_segments: int, decoded: list[int], asked: list[str]
) -> None:
    store = HashStore()
    writer = opened(store)
    for number in range(200):
        writer.append_logs([entry(number)])
    reader = opened(store)
    decoded.clear()
    asked.clear()
    assert numbers(reader, 195) == list(range(195, 200))
    assert sum(decoded) == 5
    assert asked.count("get") <= 2
    assert asked.count("list_keys") == 1
    store.close()


@pytest.mark.parametrize("batch", [1, 3, 40])
def test_reader_can_begin_at_any_entry(
    batch: int, opened: Callable[..., FscoordJournalBackend], short_segments: int, rng: random.Random
) -> None:
    store = HashStore()
    writer, reader = opened(store), opened(store)
    for first in range(0, 120, batch):
        writer.append_logs([entry(first + each) for each in range(batch)])
    starts = list(range(125))
    rng.shuffle(starts)
    for start in starts:  # forth and back
        assert numbers(reader, start) == list(range(start, 120))
        assert numbers(opened(store), start) == list(range(start, 120))
    store.close()


def test_reader_that_stops_in_the_middle_goes_on_there(
    opened: Callable[..., FscoordJournalBackend], short_segments: int
) -> None:
    store = HashStore()
    backend = opened(store)
    for first in range(0, 60, 3):
        backend.append_logs([entry(first + each) for each in range(3)])
    for stop in range(60):
        reading = backend.read_logs(0)
        for _ in range(stop):
            next(reading)
        assert numbers(backend, stop) == list(range(stop, 60))
    store.close()


def test_writer_does_not_read_back_its_own_entries(
    opened: Callable[..., FscoordJournalBackend], tmp_path: Path, reads: list[str], rng: random.Random
) -> None:
    """Between the entries of others, too. A read finds the entries of all, in one read of the log."""
    path = tmp_path / "journal"
    one, two = opened(path), opened(path)
    for number, backend in enumerate((one, two)):  # the first append of each looks for the newest segment
        backend.append_logs([entry(number)])
    assert numbers(two) == numbers(one) == [0, 1]
    for number in range(2, 60):
        writer, other = rng.choice([(one, two), (two, one)])
        reads.clear()
        writer.append_logs([entry(number)])
        assert reads == []
        start = rng.randrange(number + 1)
        for reader in (other, writer):
            reads.clear()
            assert numbers(reader, start) == list(range(start, number + 1))
            assert len(reads) == 1


def test_writer_whose_line_another_process_has_appended_reads_the_segment(
    opened: Callable[..., FscoordJournalBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handle of the writer does not know the line, or knows nothing of the segment."""
    inner = HashStore()
    known: list[bytes | None] = [None, b"", b"0123 1 []\n"]
    monkeypatch.setattr(HashStore, "_recall", lambda *_: known[0])
    backend = opened(inner)
    for number in range(3):
        backend.append_logs([entry(number)])
        del known[:1]
    assert numbers(backend) == [0, 1, 2]
    inner.close()


# -- snapshots and packing ---------------------------------------------------------------------------------------------


def optimize(storage: JournalStorage, trials: int) -> None:
    study = optuna.create_study(study_name="s", storage=storage, load_if_exists=True)
    study.optimize(lambda trial: trial.suggest_float("x", -1, 1) ** 2, n_trials=trials)


def test_new_storage_begins_with_the_snapshot(
    opened: Callable[..., FscoordJournalBackend], tmp_path: Path, decoded: list[int]
) -> None:
    path = tmp_path / "journal"
    optimize(JournalStorage(opened(path)), 205)
    assert opened(path).load_snapshot() is not None
    decoded.clear()
    storage = JournalStorage(opened(path))
    assert len(storage.get_all_trials(0)) == 205
    assert sum(decoded) < 30, "the snapshot was taken at trial 200, and a trial has three entries"
    decoded.clear()
    assert len(JournalStorage(opened(path, snapshots=False)).get_all_trials(0)) == 205
    assert sum(decoded) > 600


def test_storages_that_know_no_snapshot_read_all_after_packing(
    opened: Callable[..., FscoordJournalBackend], tmp_path: Path, short_segments: int
) -> None:
    """One was opened before and is behind, one is unpickled and reads from 0, as Optuna's do."""
    path = tmp_path / "journal"
    first = JournalStorage(opened(str(path)))
    optimize(first, 1)
    behind, pickled = JournalStorage(opened(path)), pickle.dumps(first)
    optimize(first, 210)
    opened(path).compact()
    restored = pickle.loads(pickled)
    assert restored._replay_result.log_number_read == 0
    assert behind.get_all_trials(0) == restored.get_all_trials(0) == first.get_all_trials(0)
    restored._backend.close()


@pytest.mark.parametrize("tag", [b"optuna 1.0, python 3.11\n", b"", b"no line"])
def test_snapshot_of_another_version_is_not_given_to_optuna(
    tag: bytes, opened: Callable[..., FscoordJournalBackend], tmp_path: Path
) -> None:
    backend = opened(tmp_path / "journal")
    optimize(JournalStorage(backend), 3)
    backend._store.set("optuna/snapshot", tag + b"what optuna would fail to load")
    assert backend.load_snapshot() is None
    assert len(JournalStorage(backend).get_all_trials(0)) == 3


def test_snapshot_that_is_damaged_is_passed_over(
    opened: Callable[..., FscoordJournalBackend], caplog: pytest.LogCaptureFixture
) -> None:
    store = HashStore()
    backend = opened(store)
    optimize(JournalStorage(backend), 3)
    backend.save_snapshot(b"state")
    store.set("optuna/snapshot", store.get("optuna/snapshot")[:-3])
    with caplog.at_level(logging.WARNING, "fscoord"):
        assert len(JournalStorage(backend).get_all_trials(0)) == 3
    assert "'optuna/snapshot' was not written by" in caplog.text
    store.close()


def test_snapshot_that_cannot_be_saved_ends_no_study(
    opened: Callable[..., FscoordJournalBackend], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = HashStore()
    store = FaultyStore(inner)
    backend = opened(store)
    with caplog.at_level(logging.WARNING, "fscoord"):
        with store.fails("set"):
            backend.save_snapshot(b"new")
        monkeypatch.setattr(store, "capabilities", store.capabilities._replace(value_max=10))
        backend.save_snapshot(b"long")
    assert caplog.text.count("no snapshot was saved") == 2
    assert backend.load_snapshot() is None
    inner.close()


def test_snapshots_can_be_switched_off(opened: Callable[..., FscoordJournalBackend]) -> None:
    store = HashStore()
    opened(store).save_snapshot(b"state")
    cautious = opened(store, snapshots=False)
    assert cautious.load_snapshot() is None
    cautious.save_snapshot(b"other")
    assert opened(store).load_snapshot() == b"state"
    store.close()


def test_sealed_segment_that_was_not_packed_is_packed_by_compact(
    opened: Callable[..., FscoordJournalBackend], tmp_path: Path, short_segments: int
) -> None:
    with FileStore(tmp_path / "journal") as inner:
        store = FaultyStore(inner)
        backend = opened(store)
        with store.fails("compare_set"):
            for number in range(100):
                backend.append_logs([entry(number)])
        before = {key: inner.get(key) for key in inner.list_keys()}
        assert not any(value.startswith(integration.PACKED) for value in before.values())
        other = opened(inner)
        assert other.compact() == len(before) - 1
        after = {key: inner.get(key) for key in inner.list_keys()}
        assert after.keys() == before.keys()
        assert sum(map(len, after.values())) < sum(map(len, before.values())) / 2
        assert other.compact() == 0
        assert numbers(opened(inner)) == numbers(backend) == list(range(100))
        backend.append_logs([entry(100)])
        assert numbers(other) == list(range(101))


def test_file_stays_short_while_the_journal_grows(opened: Callable[..., FscoordJournalBackend], tmp_path: Path) -> None:
    path = tmp_path / "journal"
    backend = opened(path)
    for number in range(0, 30_000, 10):
        backend.append_logs([entry(number + each) for each in range(10)])
    backend.compact()
    written = 30_000 * len(json.dumps(entry(10_000)))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < written / 4
    assert numbers(opened(path)) == list(range(30_000))


# -- other stores and wrong ones ---------------------------------------------------------------------------------------


def test_observer_without_the_right_to_write_reads_a_study(
    opened: Callable[..., FscoordJournalBackend], tmp_path: Path
) -> None:
    path = tmp_path / "journal"
    optimize(JournalStorage(opened(path)), 3)
    backend = opened(path, read_only=True)
    storage = JournalStorage(backend)
    assert len(storage.get_all_trials(0)) == 3
    with pytest.raises(StoreError, match="read_only=True; nothing was written"):
        optimize(storage, 1)
    optimize(JournalStorage(opened(path)), 1)
    assert len(storage.get_all_trials(0)) == 4


def test_store_holds_several_journals_and_other_keys(opened: Callable[..., FscoordJournalBackend]) -> None:
    store = HashStore()
    store.set("optuna", "of the program")
    one, two = opened(store), opened(PrefixStore("job", store), prefix=b"two")
    one.append_logs([entry(1)])
    two.append_logs([entry(2)])
    assert (numbers(one), numbers(two)) == ([1], [2])
    one.close()
    assert store.get("optuna") == b"of the program", "a store that was given stays open"
    store.close()


@pytest.mark.parametrize(
    "value",
    [
        b"text",
        b"no line\n",
        b"mark 1 {\n",
        b"mark 1 {}\n",
        b"mark 2 [{}]\n",
        b"mark -1 []\n",
        b"mark x []\n",
        b"packed\nnothing",
        b"packed\n" + b"x\x9c",
        b"\nsealed\n",
    ],
)
def test_foreign_value_is_an_error_that_names_the_key(
    value: bytes, opened: Callable[..., FscoordJournalBackend]
) -> None:
    store = HashStore()
    store.set("optuna/log/" + "0" * 20, value)
    with pytest.raises(StoreError, match="'optuna/log/00000000000000000000' was not written by Fscoord"):
        list(opened(store).read_logs(0))
    store.close()


def test_arguments_that_are_no_store_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"a fscoord\.Store or an address, not int"):
        FscoordJournalBackend(3)  # type: ignore[arg-type]
    with HashStore() as store, pytest.raises(TypeError, match="'durable': options are for an address"):
        FscoordJournalBackend(store, durable=True)
    for address, options in ((f"file:{tmp_path}/s?world_size=2", {}), (tmp_path / "s", {"world_size": 2})):
        with pytest.raises(ValueError, match="would remove the file, and the study"):
            FscoordJournalBackend(address, **options)
    assert list(tmp_path.iterdir()) == []


def test_address_is_that_of_the_environment_if_none_is_given(
    opened: Callable[..., FscoordJournalBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FSCOORD_STORE", raising=False)
    with pytest.raises(ValueError, match="set FSCOORD_STORE"):
        FscoordJournalBackend()
    monkeypatch.setenv("FSCOORD_STORE", f"file:{tmp_path}/a%3Fb?timeout=7")
    backend = opened()
    backend.append_logs([entry(0)])
    assert (tmp_path / "a?b").exists()
    assert backend._store.timeout.total_seconds() == 7


def test_pickled_backend_opens_a_relative_path_from_anywhere(
    opened: Callable[..., FscoordJournalBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    for address in ("journal", "file:journal?timeout=9"):
        monkeypatch.chdir(tmp_path)
        backend = opened(address, prefix="p")
        backend.append_logs([entry(1)])
        packed = pickle.dumps(backend)
        monkeypatch.chdir(tmp_path / "elsewhere")
        with pickle.loads(packed) as other:
            assert numbers(other) == numbers(backend)
            assert other._store.timeout == backend._store.timeout


def test_open_store_cannot_be_pickled_and_the_error_tells_the_remedy(
    opened: Callable[..., FscoordJournalBackend],
) -> None:
    store = HashStore()
    with pytest.raises(TypeError, match="can't be pickled: make it from the address"):
        pickle.dumps(opened(store))
    store.close()


def test_store_in_memory_is_refused_in_another_process(opened: Callable[..., FscoordJournalBackend]) -> None:
    backend = opened("mem:study")
    backend.append_logs([entry(0)])
    packed = pickle.dumps(backend)

    def child() -> None:
        for refused in (lambda: backend.append_logs([entry(1)]), lambda: pickle.loads(packed)):
            with pytest.raises(StoreError, match="in the memory of process"):
                refused()

    assert in_child(child) == 0
    assert numbers(pickle.loads(packed)) == [0]


def test_forked_child_goes_on_with_the_backend_of_its_parent(
    opened: Callable[..., FscoordJournalBackend], tmp_path: Path
) -> None:
    backend = opened(tmp_path / "journal")
    backend.append_logs([entry(0)])
    assert in_child(lambda: backend.append_logs([entry(1)])) == 0
    backend.append_logs([entry(2)])
    assert numbers(backend) == [0, 1, 2]


def test_entries_that_are_too_long_are_refused_before_anything_is_written(
    opened: Callable[..., FscoordJournalBackend],
) -> None:
    store = HashStore()
    backend = opened(store)
    with pytest.raises(LimitExceededError, match="nothing was appended"):
        backend.append_logs([{"text": "x" * (store.capabilities.value_max // 2)}])
    with pytest.raises(TypeError):
        backend.append_logs([{"object": object()}])
    backend.append_logs([])
    assert store.num_keys() == 0
    store.close()


def test_benchmark_of_the_storages_runs(memory: Path) -> None:
    (memory / "benchmarks").symlink_to(Path(__file__).parents[2] / "benchmarks")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--only", "optuna", "--quick", "--directory", str(memory)],
        cwd=memory,
        env=os.environ | {"PYTHONPATH": str(Path(fscoord.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "Optuna: open a study of 20 trials" in done.stdout


def test_missing_package_is_an_error_that_names_the_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['optuna'] = None; import fscoord.integrations.optuna"
    environment = os.environ | {"PYTHONPATH": str(Path(fscoord.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "needs optuna: install the extra, pip install 'fscoord[optuna]'" in done.stderr


# -- the page ----------------------------------------------------------------------------------------------------------


def test_example_of_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    programs = [block for block in blocks(PAGE) if block.language == "python"]
    assert programs
    root = str(Path(fscoord.__file__).parent.parent)
    for block in programs:
        name = block.text.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(block.text)
        for _ in range(2):  # the second run continues the study of the first
            done = subprocess.run(
                [sys.executable, name],
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": root},
                capture_output=True,
                text=True,
                timeout=200,
            )
            assert done.returncode == 0, done.stderr
