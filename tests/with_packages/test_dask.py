"""Dask's own schedulers, workers and clients find each other through a store, and a second scheduler takes over."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pages
import pytest
import trustme
from distributed.comm import addressing
from support.places import HANG_S

from fscoord import FileStore, HashStore, StoreTimeoutError, aio
from fscoord.integrations import dask as integration
from fscoord.integrations.dask import NAME, FscoordBackend, _Candidate, scheduler_address

pytestmark = pytest.mark.packages

CLIENT = Path(__file__).with_name("dask_client.py")
PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "dask.md"
WORKER = ("worker", "--nthreads", "1", "--no-dashboard")
SCHEDULER = ("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
PUBLISHED = ("--preload", "fscoord.integrations.dask", "--store")


class Program:
    """A program of Dask in a process group of its own, with what it logs."""

    def __init__(self, directory: Path, *arguments: object, **environment: str) -> None:
        command = [sys.executable, *map(str, arguments)]
        self._process = subprocess.Popen(
            command,
            cwd=directory,
            env=os.environ | {"DASK_TEMPORARY_DIRECTORY": str(directory)} | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def read_until(self, pattern: str) -> re.Match[str]:
        """Read what the program says, up to a line with the pattern."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            match = re.search(pattern, line)
            if match:
                return match
        raise AssertionError("".join(self.lines))

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        """Wait until the program ends by itself, and return its status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        # Not by `communicate`, which would miss what `read_until` has read ahead.
        self.lines.append(self._process.stdout.read())
        return self._process.wait(HANG_S)

    def reap(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(HANG_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass


Run = Callable[..., Program]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def url(path: Path) -> str:
    return f"fscoord://{path}?timeout={HANG_S}"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Start a program of Dask."""
    started: list[Program] = []

    def run(*arguments: object, **environment: str) -> Program:
        program = Program(tmp_path, *arguments, **environment)
        started.append(program)
        return program

    yield run
    for program in started:
        program.reap()


@pytest.fixture
def dask(run: Run) -> Run:
    """Start the command `dask`."""
    return lambda *arguments, **environment: run("-m", "dask", *arguments, **environment)


# -- a cluster ---------------------------------------------------------------------------------------------------------


def test_second_scheduler_takes_over_from_one_that_was_killed(dask: Run, run: Run, path: Path, url: str) -> None:
    early = dask(*WORKER, url)
    early.read_until(
        rf"Waiting for a scheduler to publish its address in FileStore\('{path}'\), for up to {HANG_S:g} s"
    )
    first = dask(*SCHEDULER, *PUBLISHED, path)
    address = first.read_until(r"Published (\S+) in FileStore\('\S+'\), term 1$")[1]
    late = dask(*WORKER, "--no-nanny", url)
    late.read_until(r"Start worker at: +tcp://127\.0\.0\.1:")
    client = run(CLIENT, url)
    client.read_until("ready")
    client.tell("2")
    assert client.read_until(r"^285 (\S+)")[1] == address == scheduler_address(path)

    second = dask(*SCHEDULER, *PUBLISHED, path)
    second.read_until(rf"{address} leads in FileStore\('\S+'\); this scheduler takes over when it ends")
    first.signal(signal.SIGKILL)
    other = second.read_until(r"Published (\S+) in FileStore\('\S+'\), term 2$")[1]
    assert other != address
    assert scheduler_address(path) == other

    assert (early.end(), late.end()) == (0, 0)  # as Dask's workers do when they lose their scheduler
    for _ in range(2):
        dask(*WORKER, "--no-nanny", url)
    client.tell("2")
    assert client.read_until(r"^285 (\S+)")[1] == other


def test_address_of_a_killed_scheduler_is_not_given_out(dask: Run, path: Path) -> None:
    scheduler = dask(*SCHEDULER, *PUBLISHED, path)
    address = scheduler.read_until(r"Published (\S+) in")[1]
    with FileStore(path, timeout=HANG_S) as store:
        assert scheduler_address(store, timeout=0) == address
        scheduler.signal(signal.SIGKILL)
        scheduler.end()
        with pytest.raises(
            StoreTimeoutError, match=rf"no scheduler has published .*{path}.* within 0 s; start one with"
        ):
            scheduler_address(store, timeout=0)


def test_scheduler_that_ends_withdraws_its_address(dask: Run, path: Path) -> None:
    scheduler = dask(*SCHEDULER, "--preload", "fscoord.integrations.dask", FSCOORD_STORE=str(path))
    scheduler.read_until(r"Published (\S+) in")
    scheduler.signal(signal.SIGTERM)
    assert scheduler.end() == 0
    assert "Traceback" not in "".join(scheduler.lines)
    with pytest.raises(StoreTimeoutError):
        scheduler_address(path, timeout=0)


def test_connections_are_those_of_tls_if_the_scheduler_has_tls(dask: Run, run: Run, path: Path, url: str) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    ca, cert = path.with_name("ca.pem"), path.with_name("cert.pem")
    authority.cert_pem.write_to_path(ca)
    certificate.private_key_and_cert_chain_pem.write_to_path(cert)
    prefix = "DASK_DISTRIBUTED__COMM__"
    tls = {f"{prefix}TLS__{role}__CERT": str(cert) for role in ("SCHEDULER", "WORKER", "CLIENT")}
    tls |= {f"{prefix}TLS__CA_FILE": str(ca), f"{prefix}REQUIRE_ENCRYPTION": "true"}
    scheduler = dask(*SCHEDULER, *PUBLISHED, path, **tls)
    address = scheduler.read_until(r"Published (tls://\S+) in")[1]
    worker = dask(*WORKER, "--no-nanny", DASK_SCHEDULER_ADDRESS=url, **tls)
    worker.read_until(r"Start worker at: +tls://127\.0\.0\.1:")
    client = run(CLIENT, url, **tls)
    client.tell("1")
    assert client.read_until(r"^285 (\S+)")[1] == address


# -- a candidate in this process ---------------------------------------------------------------------------------------


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What candidates log; Dask's loggers don't propagate to the one that pytest listens to."""
    integration.logger.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records]
    integration.logger.removeHandler(caplog.handler)


def test_candidate_waits_without_limit_and_withdraws_its_address(said: Callable[[], list[str]]) -> None:
    async def elect(store: HashStore) -> None:
        election = aio.Election(aio.AsyncStore(store), NAME)
        first = _Candidate(aio.AsyncStore(store.clone()), "tcp://a:1")
        assert (await election.observe(timeout=HANG_S)).data == b"tcp://a:1"
        second = _Candidate(aio.AsyncStore(store.clone()), "tcp://b:1")
        while not await election.waiters():
            await asyncio.sleep(0)
        await first.stop()
        assert (await election.observe(after=1, timeout=HANG_S)).data == b"tcp://b:1"
        await second.stop()
        assert await election.leader() is None

    with HashStore(timeout=0) as store:
        asyncio.run(asyncio.wait_for(elect(store), HANG_S))


def test_candidate_that_leads_no_more_says_which_one_does(said: Callable[[], list[str]]) -> None:
    async def elect(store: HashStore) -> None:
        asynchronous = aio.AsyncStore(store)
        election = aio.Election(asynchronous, NAME)
        first = _Candidate(aio.AsyncStore(store.clone()), "tcp://a:1")
        leader = await election.observe(timeout=HANG_S)
        second = _Candidate(aio.AsyncStore(store.clone()), "tcp://b:1")
        while not await election.waiters():
            await asyncio.sleep(0)
        assert await aio.force_release(asynchronous, NAME, leader.term)
        await election.observe(after=1, timeout=HANG_S)
        wanted = ("tcp://b:1 leads in .* now, not tcp://a:1", "tcp://a:1 is no longer published in .*removed it; .*")
        while not all(any(re.fullmatch(each, line) for line in said()) for each in wanted):
            await asyncio.sleep(0)
        await first.stop()
        assert (await election.leader()).data == b"tcp://b:1"
        await second.stop()

    with HashStore(timeout=0) as store:
        asyncio.run(asyncio.wait_for(elect(store), HANG_S))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--no-nanny"]], ids=["nanny", "no nanny"])
def test_worker_without_a_scheduler_ends_after_its_timeout(dask: Run, path: Path, more: list[str]) -> None:
    worker = dask(*WORKER, *more, f"fscoord://{path}?timeout=0.2")
    worker.read_until(r"Waiting for a scheduler to publish its address in .* for up to 0\.2 s")
    assert worker.end() != 0
    said = "".join(worker.lines)
    assert f"no scheduler has published its address in FileStore('{path}') within 0.2 s; start one with" in said


@pytest.mark.parametrize(
    ("store", "complaint"),
    [("mem:", "HashStore.* can't detect deaths"), ("{path}/below/it", r"store/below/it"), ("what:x", "unknown scheme")],
)
def test_scheduler_that_cannot_be_published_says_why_and_ends(
    dask: Run, path: Path, store: str, complaint: str
) -> None:
    path.touch()
    scheduler = dask(*SCHEDULER, *PUBLISHED, store.format(path=path))
    scheduler.read_until(rf"The scheduler ends, because its address can't be published in .*{complaint}")
    scheduler.end()
    assert "End scheduler" in scheduler.lines[-1]


def test_preload_module_asks_for_the_store(dask: Run) -> None:
    scheduler = dask(*SCHEDULER, "--preload", "fscoord.integrations.dask", "--shop", "x")
    assert scheduler.end() == 2
    assert "No such option" in scheduler.lines[-1]


def test_preload_module_is_for_schedulers_only(path: Path) -> None:
    with pytest.raises(TypeError, match=r"Start a PosixPath without it, with the address fscoord:///path"):
        asyncio.run(integration.dask_setup.callback(path, str(path)))


def test_address_without_an_absolute_path_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fscoord://host/path has no absolute path.*three slashes"):
        addressing.get_address_host("fscoord://host/path")


def test_store_may_be_any_that_is_open() -> None:
    with HashStore(timeout=0) as store, pytest.raises(StoreTimeoutError, match="HashStore"):
        scheduler_address(store)


def test_backend_answers_for_the_published_scheduler(path: Path, url: str) -> None:
    assert isinstance(addressing.registry.get_backend("fscoord"), FscoordBackend)
    from fscoord.recipes import Election

    with FileStore(path, timeout=HANG_S) as store, Election(store, "dask/scheduler", "tcp://127.0.0.1:1234"):
        assert addressing.get_address_host(url) == "127.0.0.1"
        assert addressing.get_address_host_port(url) == ("127.0.0.1", 1234)
        assert addressing.get_local_address_for(url) == "fscoord://127.0.0.1"
        assert addressing.resolve_address(url) == url


def test_error_says_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "distributed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.delitem(sys.modules, "fscoord.integrations.dask")
    with pytest.raises(ImportError, match=re.escape("pip install 'fscoord[dask]'")):
        import fscoord.integrations.dask  # noqa: F401


# -- the page ----------------------------------------------------------------------------------------------------------


def test_example_of_the_page_runs(
    dask: Run, run: Run, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = pages.blocks(PAGE)
    for block in found:
        if block.language == "python":
            pages.run_python(block, PAGE, {})
    commands = next(block.text for block in found if block.language == "sh")
    scheduler, worker = (
        shlex.split(line.removeprefix("dask ").replace("/shared/job/store", str(path)))
        for line in commands.splitlines()
    )
    started = dask(*SCHEDULER, *scheduler[1:])
    dask(*WORKER, *worker[1:])
    client = run("square.py", f"fscoord://{path}")
    assert client.end() == 0
    assert client.lines[-1].splitlines()[-1] == "285"
    address = run("address.py", path)
    assert address.end() == 0
    assert started.read_until(r"Published (\S+) in")[1] == address.lines[-1].strip()
