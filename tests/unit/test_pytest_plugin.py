"""The plugin for pytest, in runs of its own: alone, and with the workers of the real pytest-xdist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.places import HANG_S, start_thread

from fscoord.integrations.pytest import Run, _ended

REPOSITORY = Path(__file__).parents[2]
ALONE = """
import sys

import pytest

from pathlib import Path

opened = []


def test_fscoord_is_not_imported_before_a_fixture_needs_it():
    assert "pytest_fscoord" in sys.modules
    assert not {name for name in sys.modules if name.partition(".")[0] == "fscoord"}


def test_store_fixture_is_private_to_the_test(fscoord_store, tmp_path):
    assert Path(fscoord_store.path).parent == tmp_path
    assert fscoord_store.timeout.total_seconds() == 7
    fscoord_store.set("k", "v")
    opened.append(fscoord_store)


def test_store_of_the_last_test_was_closed_and_the_next_is_empty(fscoord_store):
    import fscoord

    with pytest.raises(fscoord.StoreClosedError):
        opened[0].get("k")
    assert fscoord_store.num_keys() == 0


def test_store_of_each_kind_is_empty_at_first(fscoord_each_store):
    assert fscoord_each_store.num_keys() == 0
    fscoord_each_store.set("k", "v")
    assert fscoord_each_store.list_keys() == ["k"]
    assert fscoord_each_store.timeout.total_seconds() == 7
    opened.append(fscoord_each_store)


def test_stores_were_of_three_kinds():
    assert [type(store).__name__ for store in opened[1:]] == ["FileStore", "HashStore", "PrefixStore"]


def test_run_store_is_written_by_one_test(fscoord_run_store):
    fscoord_run_store.set("kept", "1")


def test_run_store_is_read_by_the_next_test(fscoord_run_store):
    assert fscoord_run_store.get("kept") == b"1"
"""
FAKES = """
import gc
import logging

import pytest

from fscoord import FileStore, StoreTimeoutError

left = []


def test_store_is_among_the_fake_files(fs, fscoord_store):
    assert fs.exists(fscoord_store.path)


def test_order_of_the_fixtures_does_not_matter(fscoord_store, fs, caplog):
    assert fs.exists(fscoord_store.path)
    with pytest.raises(StoreTimeoutError):
        fscoord_store.wait(["never"], 0.1)
    assert not caplog.records


def test_store_is_left_open(fs):
    left.append(FileStore("/left.store", timeout=0.1))
    with pytest.raises(StoreTimeoutError):
        left[0].get("never")


def test_store_is_collected_in_a_later_test():
    left.clear()
    gc.collect()
"""
WORKERS = ["-p", "xdist", "-n", "2"]
ONCE = """
import os
from pathlib import Path

import pytest

LOG = Path(__file__).with_name("log")


def log(words):
    with LOG.open("a") as file:
        file.write(words + "\\n")


def bring_up():
    log("up")
    return f"by {os.getpid()}"


def take_down(value):
    assert value.startswith(b"by ")
    log("down")


def fail(value):
    raise ValueError(f"no way to take {value} down")


@pytest.fixture(scope="session")
def service(fscoord_once):
    if os.environ.get("FAIL"):
        fscoord_once("other", lambda: "first"), fscoord_once("bad", lambda: "bad", fail)
    return fscoord_once("service", bring_up, take_down)


@pytest.mark.parametrize("number", range(6))
def test_service_is_used_by_each_test(service, fscoord_run_store, number):
    log("use")
    fscoord_run_store.add("uses", 1)
    if str(number) == os.environ.get("DIE"):
        os._exit(3)
"""


def run_pytest(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pytest there, with the plugin named in the environment, and no other than `arguments` name."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp=tmp", *arguments],
        cwd=directory,
        env={**inherited, "PYTEST_PLUGINS": "pytest_fscoord", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )


def logged(directory: Path) -> list[str]:
    return (directory / "log").read_text().split()


def test_plugin_fixtures_work_as_documented_and_import_lazily(tmp_path: Path) -> None:
    (tmp_path / "test_alone.py").write_text(ALONE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfscoord_timeout = 7\n")
    done = run_pytest(tmp_path, "-p", "pytest_fscoord", PYTEST_DISABLE_PLUGIN_AUTOLOAD="")  # with its entry point, too
    assert done.returncode == 0, done.stdout
    assert "9 passed" in done.stdout
    assert "fscoord" not in run_pytest(tmp_path, "-p", "no:fscoord", "--fixtures", "-q").stdout


def test_once_runs_without_workers_and_a_failed_teardown_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_once.py").write_text(ONCE)
    done = run_pytest(tmp_path, FAIL="1")
    assert "6 passed, 1 error" in done.stdout, done.stdout
    assert "no way to take b'bad' down" in done.stdout
    assert logged(tmp_path) == ["up", *["use"] * 6, "down"]


def test_once_runs_in_one_worker_and_the_last_worker_tears_down(tmp_path: Path) -> None:
    (tmp_path / "test_once.py").write_text(ONCE)
    done = run_pytest(tmp_path, *WORKERS, FAIL="1")
    assert "6 passed" in done.stdout, done.stdout
    assert logged(tmp_path) == ["up", *["use"] * 6, "down"]
    assert done.returncode == 1
    assert done.stdout.count("ValueError: no way to take b'bad' down") == 1


def test_worker_replacing_a_dead_one_reuses_the_set_up_service(tmp_path: Path) -> None:
    (tmp_path / "test_once.py").write_text(ONCE)
    done = run_pytest(tmp_path, "-p", "xdist", "-n", "1", DIE="2")
    assert "1 failed, 5 passed" in done.stdout, done.stdout
    assert logged(tmp_path) == ["up", *["use"] * 6, "down"]


def test_worker_that_comes_after_the_teardown_sets_up_again(tmp_path: Path) -> None:
    """As a worker may that takes the place of one which died: here all are in one process."""
    log: list[str] = []

    def bring_up() -> str:
        log.append("up")
        return "made"

    def use(run: Run) -> bytes:
        return run.once("service", bring_up, lambda value: log.append(f"down {value.decode()}"))

    one, two, late = (Run(tmp_path / "store", name, HANG_S) for name in ("gw0", "gw1", "gw2"))
    one.register()
    two.register()
    assert use(one) == use(two) == b"made"
    with start_thread(one.end):
        two.store.close()  # as if it had died
    assert log == ["up", "down made"]
    assert use(late) == b"made"
    late.end()
    assert log == ["up", "down made", "up", "down made"]
    one.store.close()
    late.store.close()


def test_teardown_is_done_by_the_last_worker_and_the_others_wait_for_it(tmp_path: Path) -> None:
    one, two = runs = [Run(tmp_path / "store", name, HANG_S) for name in ("gw0", "gw1")]
    had_ended: list[bool] = []

    def tear_down(_: bytes) -> None:
        had_ended.append(one.store.check([_ended(run.store.register()) for run in runs]))

    two.register()
    one.once("service", lambda: "made", tear_down)
    with start_thread(one.end):
        two.store.wait([_ended(one.store.register())])
        assert one._unfinished() == [two.store.register()]
        two.once("other", lambda: "also made", tear_down)
        two.end()
    assert had_ended == [True, True]
    one.store.close()
    two.store.close()


def test_plugin_is_declared_as_an_entry_point_and_installed() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points.pytest11]\npytest_fscoord = "pytest_fscoord"\n' in project
    assert 'packages = ["fscoord", "pytest_fscoord"]' in project


def test_fixtures_of_stores_and_of_fake_files_work_together(tmp_path: Path) -> None:
    (tmp_path / "test_fakes.py").write_text(FAKES)
    ended = run_pytest(tmp_path, "-p", "pyfakefs.pytest_plugin", "-W", "error")
    assert ended.returncode == 0, ended.stdout
    assert " 4 passed" in ended.stdout
