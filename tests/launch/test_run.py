"""`fscoord run` end to end: the environment of workers, and workers that fail, hang, crash and start processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
from launch.conftest import PATIENCE_S, is_there, wait_until_gone
from support.internals import Terminated

import fscoord
from fscoord.launch.worker import Streams, WorkerGroup
from fscoord.rendezvous import RendezvousParameters, create_backend
from fscoord.rendezvous.creation import is_file_name
from fscoord.testing.contract.place import until

SAY = "os.write(1, b'%d\\n' % os.getpid())\n"
"""Says the process's number in one piece: several of them share a pipe."""

SLEEP = SAY + "sleep()\n"
ABANDON = f"""
here, there = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {SAY}
        os.write(there, b"said")
        time.sleep(600)
    os._exit(0)
os.wait()
os.read(here, 4)
"""
"""Leaves a daemon behind, in a session of its own, whose parent has ended; it says its number."""


def by_rank(out):
    """The lines of output of each rank, without what stands before them."""
    found = {}
    for line in out.splitlines():
        if line.startswith("fscoord: "):
            continue
        match = re.fullmatch(r"\[(\d+)\] (.*)", line)
        found.setdefault(int(match[1]), []).append(match[2])
    return found


def number(line):
    return int(line.rpartition(" ")[2])


def announced(err):
    """The lines for people, without those of the workers."""
    return [line.removeprefix("fscoord: ") for line in err.splitlines() if line.startswith("fscoord: ")]


def test_workers_get_their_ranks_and_share_a_fresh_store(launch, script, tmp_path):
    worker = script("""
import fscoord, json
print(json.dumps(dict(os.environ)))
store = fscoord.open_store()
assert store.add("came", 1) <= 2
store.barrier("all", 2)
""")
    for _ in range(2):  # the second time nothing of the first is there
        code, out, err = launch(
            "--nproc-per-node", 2, "--rdzv-endpoint", tmp_path / "job", "--rdzv-id", "x", worker
        ).end()
        assert (code, err) == (0, "")
    for rank, (line,) in by_rank(out).items():
        told = json.loads(line)
        numbers = {name: int(told[name]) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
        assert numbers == dict.fromkeys(numbers, rank)
        assert {told[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")} == {"2"}
        assert (told["GROUP_RANK"], told["GROUP_WORLD_SIZE"], told["FSCOORD_RESTART_COUNT"]) == ("0", "1", "0")
        assert told["FSCOORD_RUN_ID"] == told["TORCHELASTIC_RUN_ID"] == "x"
        assert told["MASTER_ADDR"]
        assert 0 < int(told["MASTER_PORT"]) < 65536
    assert set(by_rank(out)) == {0, 1}
    assert not [path for path in tmp_path.iterdir() if "round" in path.name]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_worker_that_fails_ends_the_job_and_is_named_with_its_last_output(launch, script, tmp_path):
    worker = script("if rank == 1: raise ValueError('no way\\x1b[2J')\ntime.sleep(600)\n")
    code, _, err = launch("--nproc-per-node", 3, worker).end()
    assert code == 1
    said = announced(err)
    assert re.fullmatch(
        r"the job failed after 0 restarts, because rank 1 failed in round 0: exit code 1"
        r" \(local rank 1, process [0-9]+ on .+\)",
        said[0],
    )
    assert "  | ValueError: no way\\x1b[2J" in said


def test_store_of_the_round_that_failed_last_is_kept_and_named(launch, script, tmp_path):
    worker = script("import fscoord\nfscoord.open_store().set('why', str(rank))\nsys.exit(1)\n")
    words = ("--max-restarts", 1, "--rdzv-endpoint", "job", "--rdzv-id", "a/b", worker)
    code, _, err = launch(*words).end()
    assert code == 1
    (room,) = tmp_path.glob("job.round-*")
    assert room.name == "job.round-a%2Fb-0-1"
    said = announced(err)[-1]
    assert said.startswith("the store of round 1 is kept until you remove it; to look closer, run fscoord ps file:")
    address = said.rpartition(" ")[2].strip("'")
    with fscoord.open_store(address, read_only=True, timeout=0) as store:
        assert (store.get("why"), [member.rank for member in store.members()]) == (b"0", [0])
    assert launch(*words[:-1], script("")).end()[0] == 0
    assert [path.name for path in tmp_path.glob("job.round-*")] == [room.name]  # of another life


def test_temporary_store_of_a_job_that_failed_is_kept_if_it_was_used(launch, script, tmp_path):
    code, _, err = launch(script("import fscoord\nfscoord.open_store().set('k', 'v')\nsys.exit(1)")).end()
    assert code == 1
    assert os.path.exists(announced(err)[-1].rpartition(" file://")[2])
    for path in (tmp_path / "tmp").iterdir():
        shutil.rmtree(path)
    code, _, err = launch(script("sys.exit(1)")).end()
    assert code == 1
    assert "is kept" not in err
    assert list((tmp_path / "tmp").iterdir()) == []


def test_workers_show_their_ranks_in_their_store(launch, script):
    worker = script("""
import fscoord
with fscoord.open_store() as store:
    store.barrier("all", 2)
    print(sorted(member.rank for member in store.members()))
    store.barrier("end", 2)
""")
    code, out, _ = launch("--nproc-per-node", 2, worker).end()
    assert (code, by_rank(out)) == (0, {0: ["[0, 1]"], 1: ["[0, 1]"]})


def is_refused_for(run, err):
    """Return whether `err` refuses a job because that of `run` has the endpoint."""
    since = r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2} UTC"
    begin = rf"^fscoord: the rendezvous '\w+' at \S+/job belongs to a job that has run since {since} on 1 node"
    return re.search(rf"{begin} \({re.escape(socket.gethostname())}:{run.process.pid}\)", err)


@pytest.mark.parametrize("words", [(), ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=0.1")])
@pytest.mark.parametrize("name", [None, "given"])
def test_second_job_on_an_endpoint_is_refused_unless_it_may_join(launch, script, tmp_path, words, name):
    worker = script("print(os.environ['WORLD_SIZE'], flush=True)\nwhile not os.path.exists('over'): time.sleep(0.02)\n")
    prefix = len("[0] ") if words else 0  # with one worker at most, it has the console itself
    words = ("--rdzv-endpoint", tmp_path / "job", *words, *(("--rdzv-id", name) if name else ()), worker)
    first = launch(*words)
    assert first.line()[prefix:] == "1"
    second = launch(*words)
    if len(words) > 5 and name:
        for run in (first, second):
            while run.line()[prefix:] != "2":  # the second may have been alone for a moment
                pass
    else:
        code, out, err = second.end()
        assert (code, out) == (69, "")
        assert is_refused_for(first, err), err
    (tmp_path / "over").touch()
    assert first.end()[:2] == (0, "")
    code, out, _ = launch(*words).end()
    assert (code, out[prefix:]) == (0, "1\n")


def test_job_after_one_whose_launcher_was_killed_runs_and_counts_from_the_beginning(launch, script, tmp_path):
    worker = script("""
count = os.environ["FSCOORD_RESTART_COUNT"]
print(count, flush=True)
if os.path.exists("over"): sys.exit()
if count == "0": sys.exit(1)
time.sleep(600)
""")
    words = ("--rdzv-endpoint", tmp_path / "job", "--max-restarts", 1, worker)
    first = launch(*words)
    assert (first.line(), first.line()) == ("0", "1")
    first.process.kill()
    first.process.wait()
    (tmp_path / "over").touch()
    assert launch(*words).end()[:2] == (0, "0\n")


def test_jobs_of_two_names_in_one_file_have_stores_of_their_own(launch, script, tmp_path):
    worker = script("""
import fscoord
store = fscoord.open_store()
print(store.add("came", 1), flush=True)
while not os.path.exists("over"): time.sleep(0.02)
store.add("came", 1)
print(store.get("came").decode())
""")
    runs = [launch("--rdzv-endpoint", tmp_path / "job", "--rdzv-id", name, worker) for name in "ab"]
    assert [run.line() for run in runs] == ["1", "1"]
    (tmp_path / "over").touch()
    assert [run.end()[:2] for run in runs] == [(0, "2\n")] * 2


def test_options_of_the_endpoint_are_those_of_all_that_the_launcher_makes(launch, script, tmp_path):
    worker = script("""
import fscoord
store = fscoord.open_store()
room = os.path.dirname(store.path)
for path in (room, store.path): print(oct(os.stat(path).st_mode))
print(os.environ["FSCOORD_STORE"].partition("?")[2])
""")
    endpoint = "file:job?mode=0660&durable=1&lock=flock&compact_bytes=1000000&timeout=50"
    code, out, _ = launch("--rdzv-endpoint", endpoint, "--log-dir", "logs", "-t", 1, worker).end()
    options = "lock=flock&durable=1&compact_bytes=1000000&mode=660&rank=0"
    assert (code, by_rank(out)) == (0, {0: ["0o42770", "0o100660", options]})
    found = {path.name: oct(path.stat().st_mode) for path in [tmp_path / "logs", *(tmp_path / "logs").rglob("*")]}
    (run,) = (tmp_path / "logs").iterdir()
    assert found == {
        "logs": "0o42770",
        **dict.fromkeys((run.name, "round-0", "0"), "0o42750"),
        "stdout.log": "0o100660",
    }


def test_timeout_of_the_endpoint_is_that_of_the_rendezvous(tmp_path):
    for text, options, found in (("?timeout=7", {}, 7), ("", {}, 60), ("?timeout=7", {"read_timeout": "9"}, 9)):
        params = RendezvousParameters("c10d", f"file:{tmp_path}/job{text}", "id", 1, 1, **options)
        _, store = create_backend(params)
        with store:
            assert store.timeout.total_seconds() == found


def test_roles_are_counted_apart_on_all_nodes(launch, script, tmp_path):
    names = ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE")
    worker = script(f"print(*[os.environ[name] for name in {names}], flush=True)\n")
    common = ("--nnodes", 3, "--rdzv-endpoint", tmp_path / "job")
    sorts = (("trainer", 2), ("a reader", 1), ("trainer", 1))
    runs = [launch(*common, "--role", role, "--nproc-per-node", count, worker) for role, count in sorts]
    ends = [run.end() for run in runs]
    assert [code for code, _, _ in ends] == [0, 0, 0]
    lines = sorted(line for _, out, _ in ends for each in by_rank(out).values() for line in each)
    assert lines == ["a reader 0 1 4", "trainer 0 3 4", "trainer 1 3 4", "trainer 2 3 4"]


def test_nodes_that_share_a_log_directory_write_to_directories_of_their_own(launch, script, tmp_path):
    worker = script("print(rank)\n")
    common = ("--nnodes", 2, "--rdzv-endpoint", tmp_path / "job", "--rdzv-id", "a/b", "--log-dir", "logs", "-r", "1")
    runs = [launch(*common, worker) for _ in range(2)]
    assert [run.end()[0] for run in runs] == [0, 0]
    files = sorted((tmp_path / "logs").glob("a%2Fb_*/round-0/0/stdout.log"))
    assert sorted(path.read_text() for path in files) == ["0\n", "1\n"]


def test_workers_are_restarted_together_until_the_limit(launch, script):
    worker = script("""
count = os.environ["FSCOORD_RESTART_COUNT"]
print("attempt", count, flush=True)
sys.exit(3 if rank == 0 and int(count) < int(sys.argv[1]) else 0)
""")
    code, out, _ = launch("--nproc-per-node", 2, "--max-restarts", 2, worker, 2).end()
    assert code == 0
    assert by_rank(out)[0] == ["attempt 0", "attempt 1", "attempt 2"]
    code, _, err = launch("--nproc-per-node", 1, "--max-restarts", 1, worker, 2).end()
    assert code == 1
    assert "the job failed after 1 restart, because rank 0 failed in round 1: exit code 3" in err
    assert re.search(r"fscoord: rank 0 failed in round 0: exit code 3 .*; all workers stop, and start again", err)
    assert re.search(r"fscoord: round 1 begins \(restart 1 of 1, after the failure of rank 0\): 1 node, 1 worker", err)
    assert "exit code 3" in err


def test_worker_that_ignores_sigterm_is_killed_after_the_grace(launch, script):
    worker = script("""
signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
open(f"ready{rank}", "w").close()
if rank == 0:
    while not os.path.exists("ready1"): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
sleep()
""")
    code, out, err = launch("--nproc-per-node", 2, "--grace", 5, worker).end()
    assert code == 1
    assert "rank 0 failed in round 0: killed by SIGKILL (local rank 0," in err
    assert by_rank(out) == {1: ["heard"]}


def test_processes_started_and_abandoned_by_a_worker_end_with_it(launch, script):
    code, out, _ = launch(script(ABANDON)).end()
    assert code == 0
    assert not is_there(number(out.strip()))


def test_worker_that_multiplies_by_forks_leaves_no_process(launch, script, tmp_path):
    worker = script("""
leader = os.getpid()
for _ in range(5):
    if os.fork() == 0: os.setsid()
with open("pids", "ab", buffering=0) as file:
    file.write(b"%d\\n" % os.getpid())
while rank == 0 or os.getpid() != leader or len(open("pids").readlines()) < 64:
    time.sleep(0.01)
sys.exit(1)
""")
    code, _, _ = launch("--nproc-per-node", 2, "--grace", 0.1, worker).end()
    assert code == 1
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 64
    assert not [pid for pid in pids if is_there(pid)]


@pytest.mark.parametrize(
    ("order", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)]
)
def test_signal_ends_all_workers_in_good_order(launch, script, tmp_path, order, code):
    run = launch("--nproc-per-node", 2, script(ABANDON + SLEEP))
    pids = [number(run.line()) for _ in range(4)]
    run.process.send_signal(order)
    found, _, err = run.end()
    assert found == code
    assert announced(err) == [f"{order.name}: the workers of this node have 30 s to end; a second signal kills them"]
    assert not re.search("^Traceback", err, re.MULTILINE)
    assert not [pid for pid in pids if is_there(pid)]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_signal_is_passed_on_to_the_workers_which_have_the_grace_to_end(launch, script, tmp_path):
    worker = script("""
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved", flush=True)))
print("ready", flush=True)
sleep()
""")
    run = launch(worker)
    assert run.line() == "ready"
    run.process.send_signal(signal.SIGTERM)
    assert run.line() == "saved"
    assert run.end()[0] == 143


@pytest.mark.parametrize(
    ("part", "name"), [(WorkerGroup, "start"), (Streams, "is_shown")], ids=["between", "in the middle"]
)
def test_signal_while_workers_are_started_gives_the_first_ones_their_grace(
    fscoord_in_process, script, tmp_path, monkeypatch, capsys, part, name
):
    """It comes after the start of the first worker, or when that worker runs and no thread reads its output yet."""
    worker = script("""
signal.signal(signal.SIGTERM, lambda *_: sys.exit(open("saved", "w").close()))
open("ready", "w").close()
sleep()
""")
    call, sent = getattr(part, name), []

    def call_and_signal(self, *arguments):
        found = call(self, *arguments)
        until(Path("ready").exists)
        if not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(part, name, call_and_signal)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Terminated) as caught:
        fscoord_in_process("run", "--nproc-per-node", "2", worker)
    assert caught.value.number == signal.SIGTERM
    err = capsys.readouterr().err
    assert Path("saved").exists(), err
    assert "SIGTERM: the workers of this node have 30 s to end" in err


def test_second_signal_kills_workers_that_take_their_time(launch, script):
    run = launch(script("signal.signal(signal.SIGINT, lambda *_: print('heard', flush=True))\n" + SLEEP))
    pid = number(run.line())
    run.process.send_signal(signal.SIGINT)
    assert run.line() == "heard"
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert not is_there(pid)


def test_agent_that_is_killed_leaves_no_process(launch, script):
    run = launch("--nproc-per-node", 2, script(ABANDON + SLEEP))
    pids = [number(run.line()) for _ in range(4)]
    run.process.kill()
    wait_until_gone(pids)


@pytest.mark.parametrize("order", [signal.SIGUSR1, signal.SIGUSR2])
def test_signal_of_a_user_is_said_and_the_workers_go_on(launch, script, tmp_path, order):
    run = launch("--nproc-per-node", 2, script(SAY + "while not os.path.exists('over'): time.sleep(0.02)\n"))
    assert {run.line()[:4] for _ in range(2)} == {"[0] ", "[1] "}
    run.process.send_signal(order)
    words = f"fscoord: {order.name}: received; the workers do not get it without --forward-signals {order.name[3:]}\n"
    assert run.process.stderr.readline() == words
    (tmp_path / "over").touch()
    assert run.end() == (0, "", "")


def test_signal_of_a_user_is_forwarded_to_each_worker_alone_if_requested(launch, script):
    """As by `fscoord lock`: a process that a worker has started may have no handler, and would die."""
    worker = script("""
child = os.fork()
if not child:
    signal.pause()
saved = []
signal.signal(signal.SIGUSR1, lambda *_: saved.append(print("saved", flush=True)))
print("ready", flush=True)
while not saved: time.sleep(0.02)
assert os.waitpid(child, os.WNOHANG) == (0, 0)
""")
    run = launch("--nproc-per-node", 2, "--forward-signals", "USR1,sigusr2", worker)
    assert {run.line() for _ in range(2)} == {"[0] ready", "[1] ready"}
    run.process.send_signal(signal.SIGUSR1)
    code, out, err = run.end()
    assert (code, sorted(out.splitlines())) == (0, ["[0] saved", "[1] saved"])
    assert announced(err) == ["SIGUSR1: forwarded to the workers of this node"]


OUTPUTS = "for fd in (1, 2): os.write(fd, os.readlink(f'/proc/self/fd/{fd}').encode() + b'\\n')\n"


def test_single_worker_has_the_console_itself(launch, script):
    run = launch(script(OUTPUTS))
    pipes = [f"pipe:[{os.fstat(pipe.fileno()).st_ino}]\n" for pipe in (run.process.stdout, run.process.stderr)]
    assert run.end() == (0, *pipes)
    run = launch("--redirects", "2", script(OUTPUTS))
    assert run.line() == f"pipe:[{os.fstat(run.process.stdout.fileno()).st_ino}]"
    assert run.end()[0] == 0


def test_rank_of_the_option_console_has_the_console_itself(launch, script):
    run = launch("--nproc-per-node", 2, "--console", 1, script(OUTPUTS))
    code, out, _ = run.end()
    by_prefix = {line.startswith("[0] "): line for line in out.splitlines()}
    assert code == 0
    assert by_prefix[True] != f"[0] {by_prefix[False]}"


def test_signal_that_is_to_be_handled_ends_the_workers_as_with_torchrun(launch, script):
    worker = script("signal.signal(signal.SIGUSR1, lambda *_: sys.exit(print('saved', flush=True)))\n" + SLEEP)
    run = launch("--signals-to-handle", "SIGTERM,SIGUSR1", worker)
    run.line()
    run.process.send_signal(signal.SIGUSR1)
    code, out, err = run.end()
    assert (code, out) == (138, "saved\n")
    assert announced(err) == ["SIGUSR1: the workers of this node have 30 s to end; a second signal kills them"]


STOP_WARDEN = "os.kill(os.getppid(), signal.SIGSTOP)\n"


def test_worker_that_stops_its_warden_is_killed_after_the_grace(launch, script):
    run = launch("--grace", 0.1, script(STOP_WARDEN + SLEEP))
    pid = number(run.line())
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert code == 143
    assert announced(err) == ["SIGTERM: the workers of this node have 0.1 s to end; a second signal kills them"]
    assert not is_there(pid)


def test_worker_that_stops_its_warden_ends_with_an_agent_that_is_killed(launch, script):
    run = launch(script(STOP_WARDEN + SLEEP))
    pid = number(run.line())
    run.process.kill()
    wait_until_gone([pid])


def test_worker_whose_warden_is_killed_ends_and_counts_as_failed(launch, script):
    run = launch(script("os.write(1, b'%d\\n' % os.getppid())\n" + SLEEP))
    warden, worker = number(run.line()), number(run.line())
    os.kill(warden, signal.SIGKILL)
    code, _, err = run.end()
    assert code == 1
    assert "the warden of this worker was killed" in err
    wait_until_gone([worker])


def test_worker_whose_warden_is_killed_leaves_no_process(launch, script):
    run = launch(script(ABANDON + "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(600)\n"))
    daemon = number(run.line())
    code, _, err = run.end()
    assert code == 1
    assert "the warden of this worker was killed" in err
    assert not is_there(daemon)


def test_streams_go_to_files_to_the_console_or_to_both(launch, script, tmp_path):
    worker = script("print('out', rank)\nprint('err', rank, file=sys.stderr)\nsys.stdout.write('no newline')\n")
    run = launch("--nproc-per-node", 2, "--rdzv-id", 7, "--log-dir", "logs", "-r", "0:1", "-t", "1:3", worker)
    code, out, err = run.end()
    assert code == 0
    assert by_rank(out) == {1: ["out 1", "no newline"]}
    assert by_rank(err) == {0: ["err 0"], 1: ["err 1"]}
    (logs,) = (tmp_path / "logs").iterdir()
    assert logs.name.startswith("7_")
    assert announced(err) == [f"the files of this node's workers are in {logs}"]
    files = {str(path.relative_to(logs)): path.read_text() for path in logs.rglob("*.log")}
    modes = {path.stat().st_mode & 0o777 for path in logs.rglob("*.log")}
    assert modes == {0o644 & ~os.umask(os.umask(0))}
    assert files == {
        "round-0/0/stdout.log": "out 0\nno newline",
        "round-0/1/stdout.log": "out 1\nno newline",
        "round-0/1/stderr.log": "err 1\n",
    }


def test_traceback_in_the_error_file_is_shown_and_the_file_named(launch, script):
    worker = script("""
import json
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({"message": {"message": "m", "extraInfo": {"py_callstack": "the traceback", "timestamp": "1"}}}, file)
sys.exit(1)
""")
    code, _, err = launch("--log-dir", "logs", "--rdzv-id", 7, worker).end()
    assert code == 1
    assert "  | the traceback" in err
    assert re.search(r"the traceback is in \S+logs/7_\w+/round-0/0/error.json on ", err)


def test_program_may_be_a_module_or_any_executable(launch):
    assert launch("-m", "this").end()[1].startswith("The Zen of Python")
    code, out, _ = launch("--nproc-per-node", 2, "--", "sh", "-c", "echo $LOCAL_RANK-$1", "x", "--y").end()
    assert code == 0
    assert by_rank(out) == {0: ["0---y"], 1: ["1---y"]}


def test_program_that_is_not_there_is_reported_as_a_failure(launch):
    code, _, err = launch("./nothing").end()
    assert code == 1
    assert "exit code 127" in err
    assert "./nothing: No such file or directory" in err


@pytest.mark.parametrize(
    "words",
    [
        *(["--nnodes", "2", "x.py"], ["--nnodes", "0", "x.py"], ["--nnodes", "3:2", "x.py"], ["--nnodes", "a", "x.py"]),
        *(["-r", "4", "x.py"], ["--rdzv-conf", "a", "x.py"], ["--rdzv-conf", "join_timeout=x", "x.py"], []),
    ],
)
def test_arguments_that_make_no_sense_are_refused(fscoord_in_process, words):
    assert fscoord_in_process("run", *words).code == 64


def test_nodes_meet_and_number_their_workers_consecutively(launch, script, tmp_path):
    worker = script("print(rank, os.environ['WORLD_SIZE'], os.environ['GROUP_RANK'], flush=True)\n")
    common = ("--nnodes", 2, "--rdzv-endpoint", tmp_path / "job")
    runs = [launch(*common, "--nproc-per-node", count, worker) for count in (1, 2)]
    ends = [run.end() for run in runs]
    assert [code for code, _, _ in ends] == [0, 0]
    lines = sorted(line for _, out, _ in ends for each in by_rank(out).values() for line in each)
    assert [line.split()[:2] for line in lines] == [["0", "3"], ["1", "3"], ["2", "3"]]
    assert sorted(len(by_rank(out)) for _, out, _ in ends) == [1, 2]


def test_worker_that_fails_on_one_node_fails_all_nodes_with_the_same_report(launch, script, tmp_path):
    worker = script("if rank == 1: sys.exit(9)\ntime.sleep(600)\n")
    runs = [launch("--nnodes", 2, "--rdzv-endpoint", tmp_path / "job", worker) for _ in range(2)]
    ends = [run.end() for run in runs]
    assert [code for code, _, _ in ends] == [1, 1]
    shown = [re.findall(r"because rank 1 .*exit code 9.*", err) for _, _, err in ends]
    assert shown[0] == shown[1] != []


def test_node_that_comes_late_is_let_in_and_one_that_dies_is_done_without(launch, script, tmp_path):
    worker = script("print(os.environ['WORLD_SIZE'], flush=True)\nwhile not os.path.exists('over'): time.sleep(0.02)\n")
    conf = "last_call_timeout=0.5,keep_alive_interval=0.2"
    common = ("--nnodes", "1:2", "--rdzv-endpoint", tmp_path / "job", "--rdzv-id", 7, "--rdzv-conf", conf, "--grace", 1)
    common += (worker,)
    first = launch(*common)
    assert first.line() == "[0] 1"
    second = launch(*common)
    while not first.line().endswith("] 2"):  # the second may have been alone for a moment
        pass
    while not second.line().endswith("] 2"):
        pass
    second.process.kill()
    while first.line() != "[0] 1":
        pass
    (tmp_path / "over").touch()
    assert first.end()[0] == 0


def test_endpoint_that_is_a_bare_file_name_is_a_file(launch, script, tmp_path):
    worker = script("print(os.environ['FSCOORD_STORE'])\n")
    code, out, err = launch("--rdzv-endpoint", "nodes.s", worker).end()
    assert (code, err) == (0, "")
    assert f"file://{tmp_path}/nodes.s.round-" in out
    assert (tmp_path / "nodes.s").exists()


def test_endpoint_with_a_port_or_an_address_is_a_host():
    assert all(map(is_file_name, ("nodes.s", "job")))
    places = ("", "a/b", "node1:29400", "localhost", "10.0.0.1", "::1", "[::1]:5", "mem:x")
    assert not any(map(is_file_name, places))


def test_nodes_of_a_slurm_step_need_not_be_counted(launch, script):
    worker = script("print(os.environ['FSCOORD_RUN_ID'])\n")
    slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    code, out, _ = launch("--rdzv-endpoint", "job.d/x", worker, **slurm, SLURM_STEP_NUM_NODES="2").end()
    assert code == 69  # two nodes, and no directory to meet in
    code, out, _ = launch("--rdzv-endpoint", "./x", worker, **slurm, SLURM_STEP_NUM_NODES="1").end()
    assert (code, out) == (0, "77-0\n")


def test_node_that_waits_for_others_tells_how_many_are_here_and_until_when(launch, script):
    run = launch("--nnodes", "2:4", "--rdzv-endpoint", "job", script(""))
    line = run.process.stderr.readline()
    clock = "[0-9]{2}:[0-9]{2}:[0-9]{2} UTC"
    assert re.fullmatch(f"fscoord: waiting for nodes: 1 of 2 here, since {clock}, until {clock}\n", line)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == (130, "", "\n")  # so that a shell's prompt does not follow ^C


def test_quiet_node_tells_only_why_the_job_failed(launch, script):
    code, _, err = launch("--quiet", "--max-restarts", 1, "-r", 3, script("sys.exit(1)")).end()
    assert code == 1
    (line,) = announced(err)
    assert line.startswith("the job failed after 1 restart, because rank 0 failed in round 1: exit code 1")


def test_rounds_and_lost_nodes_are_told(launch, script, tmp_path):
    worker = script("print(os.environ['WORLD_SIZE'], flush=True)\nwhile not os.path.exists('over'): time.sleep(0.02)\n")
    conf = "last_call_timeout=0.2,keep_alive_interval=0.2"
    words = ("--nnodes", "1:2", "--rdzv-endpoint", tmp_path / "job", "--rdzv-id", 7, "--rdzv-conf", conf, "--grace", 1)
    words += (worker,)
    first, second = launch(*words), launch(*words)
    while not first.line().endswith(" 2"):
        pass
    while not second.line().endswith(" 2"):
        pass
    second.process.kill()
    while not first.line().endswith(" 1"):
        pass
    (tmp_path / "over").touch()
    code, _, err = first.end()
    assert code == 0
    told = announced(err)
    lost = rf"round \d+ is over: lost \S+:{second.process.pid}, which died or left; the workers stop, and the next .*"
    assert any(re.fullmatch(lost, line) for line in told), told
    begins = (
        r"round \d+ begins without the lost nodes: 1 node, 1 worker; this node is number 0 and starts 1 worker, rank 0"
    )
    assert re.fullmatch(begins, told[-1])


def test_verbose_node_speaks_to_people_and_not_in_json(launch, script):
    run = launch("-v", script(""))
    code, _, err = run.end()
    assert code == 0
    assert f"fscoord: the node {socket.gethostname()}:{run.process.pid} comes to the rendezvous\n" in err
    assert "{" not in err


@pytest.mark.parametrize(
    ("stuck", "order", "expected"),
    [("1", signal.SIGTERM, 143), ("2", signal.SIGTERM, 143), ("1, 2", signal.SIGINT, 130)],
)
@pytest.mark.parametrize("console", [0, 1], ids=["passed", "copied"])
def test_node_whose_output_is_not_read_ends_by_a_signal_with_its_workers(
    launch, script, tmp_path, order, expected, stuck, console
):
    """Also with -v: the log is written to standard error by all threads, which must not wait for its reader either.

    A worker that SIGINT interrupts is stuck again as it writes its traceback, until it is killed after the grace.
    """
    worker = script(f"""
with open("pid", "w") as file: print(os.getpid(), file=file)
while True:
    for end in [{stuck}]: os.write(end, b"x" * 4095 + b"\\n")
""")
    run = launch("-v", "--grace", 1, "--console", console, worker)
    until(lambda: is_blocked(tmp_path / "pid"))
    run.process.send_signal(order)
    assert run.process.wait(PATIENCE_S) == expected
    assert not is_there(int((tmp_path / "pid").read_text()))
    if stuck == "1" and console == 1:
        lost = r"^fscoord: standard output: its reader takes no data; \d+ lines of output were dropped$"
        assert re.search(lost, run.process.stderr.read(), re.MULTILINE)


def is_blocked(file):
    """Return whether the process whose number is in `file` waits in the kernel, to write to a pipe."""
    if not file.exists() or not file.read_text().endswith("\n"):
        return False
    pid = int(file.read_text())
    return all("pipe" in (Path(f"/proc/{pid}/wchan").read_text(), time.sleep(0.02))[0] for _ in range(10))


def test_lines_with_a_text_go_to_one_file_of_the_node_under_the_given_prefix(launch, script, tmp_path):
    words = [
        "--tee",
        "0:1,1:3",
        "--local-ranks-filter",
        "0,1",
        "--duplicate-stdout-filters",
        "apple,two",
        "--role",
        "r",
    ]
    program = script("print('apple', rank); print('two' if rank else 'one'); print('apple', file=sys.stderr)")
    run = launch(
        *["--nproc-per-node", 3, "--log-dir", "logs", "--duplicate-stderr-filters", "app", *words, program],
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="<${role_name} ${rank} $local_rank $other>",
    )
    code, out, err = run.end()
    assert code == 0, err
    (stdout,) = tmp_path.glob("logs/*/round-0/filtered_stdout.log")
    zero, one = "<r 0 0 $other>", "<r 1 1 $other>"
    assert sorted(stdout.read_text().splitlines()) == [f"{zero}apple 0", f"{one}apple 1", f"{one}two"]
    assert stdout.with_name("filtered_stderr.log").read_text() == f"{one}apple\n"
    assert sorted(out.splitlines()) == [f"{zero}apple 0", f"{zero}one", f"{one}apple 1", f"{one}two"]


def test_workers_with_a_virtual_local_rank_see_one_gpu_each(launch, script):
    program = script("print(os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'])")
    words = ["--nproc-per-node", 2, "--virtual-local-rank", program]
    run = launch(*words, CUDA_VISIBLE_DEVICES="3, 5,7")
    code, out, err = run.end()
    assert (code, sorted(out.splitlines())) == (0, ["[0] 0 3", "[1] 0 5"]), err
