"""`run_held` and the warden of a held command: signals, lost holds, and processes that are left behind or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from launch.conftest import PATIENCE_S, is_there, wait_until_gone
from support.internals import system
from support.places import until

from fscoord.errors import (
    FscoordError,
    LimitExceededError,
    LockLostError,
    SessionDeadError,
    StoreGoneError,
    StoreTimeoutError,
)
from fscoord.launch import held, run_held, warden

OUTPUT_MAX = 10_000
AWAIT_SIGNAL = "while :; do sleep 0.02; done"


def run(text, check=lambda: None, *, grace=30.0, **options):
    options = {"output_max": OUTPUT_MAX, **options}
    return run_held(["sh", "-c", text], dict(os.environ), check, grace=grace, **options)


def numbers(output):
    return [int(word) for word in output.split()]


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(held, "CHECK_INTERVAL_S", 0.01)


def test_command_ends_with_its_own_code_and_its_output_is_kept():
    ending = run("echo said; exit 7")
    assert ending == (7, frozenset(), b"said\n")
    assert ending.code == 7
    assert ending.interruption == 0


def test_command_killed_by_a_signal_has_the_code_that_shells_give():
    ending = run("kill -9 $$")
    assert (ending.status, ending.code) == (-9, 137)


def test_command_has_the_input_the_group_and_the_session_of_its_caller():
    reader, writer = os.pipe()
    os.write(writer, b"from outside\n")
    os.close(writer)
    code = """if True:
        import os
        from fscoord.launch import run_held
        before = os.getpgrp(), os.getsid(0)
        run_held(["sh", "-c", "cat; cut -d' ' -f5,6 /proc/$$/stat"],
                 dict(os.environ), lambda: None, grace=1)
        print(*before)
    """
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=reader, capture_output=True, timeout=PATIENCE_S, check=True
    )
    os.close(reader)
    said, theirs, ours = done.stdout.splitlines()
    assert said == b"from outside"
    assert theirs == ours


def test_command_has_the_descriptors_that_its_caller_has_passed_and_no_others(tmp_path):
    code = """if True:
        import os, sys
        from fscoord import FileStore
        from fscoord.launch import run_held
        with FileStore(sys.argv[1]) as store:
            try:
                store.wait(["absent"], 0.01)  # the store has its descriptors for waits
            except TimeoutError:
                pass
            run_held(["sh", "-c", "cat /dev/fd/$PASSED; echo; ls /proc/$$/fd"], dict(os.environ), lambda: None, grace=1)
    """
    reader, writer = os.pipe()
    os.write(writer, b"passed on")
    os.close(writer)
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "store"],
        env={**os.environ, "PASSED": str(reader)},
        pass_fds=[reader],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_S,
        check=True,
    )
    os.close(reader)
    said, *numbers = done.stdout.split(b"\n")
    assert said == b"passed on"
    assert {int(number) for number in numbers if number} == {0, 1, 2, reader}


def test_pipes_of_a_command_are_not_those_of_a_command_of_another_thread(monkeypatch):
    """A second command that starts at this moment would keep the report open, and the first one would not end."""
    popen, passed = subprocess.Popen, []

    def start(words, **options):
        passed.extend(os.get_inheritable(int(number)) for number in words[5:7])
        return popen(words, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    assert run("exit 3").code == 3
    assert passed == [False, False]


def test_command_has_another_input_if_requested():
    with system.unnamed_file(b"from a file") as file:
        assert run("cat", stdin=file).output == b"from a file"


@pytest.mark.parametrize("name", ["nothing-of-this-name", "/", "/dev/null"])
def test_command_that_can_not_be_run_is_named(name):
    with pytest.raises(FscoordError, match=f"can't run {name}: "):
        run_held([name], dict(os.environ), lambda: None, grace=1)


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "QUIT", "USR1", "USR2"])
def test_signal_is_passed_on_to_the_command(name):
    ending = run(f"trap 'echo {name}; exit 3' {name}; kill -{name} {os.getpid()}; {AWAIT_SIGNAL}")
    assert ending.status == 3
    assert ending.output == f"{name}\n".encode()
    assert ending.passed == {getattr(signal, f"SIG{name}")}
    assert ending.interruption == (getattr(signal, f"SIG{name}") if name in ("INT", "TERM", "HUP") else 0)


@pytest.mark.parametrize("output_max", [OUTPUT_MAX, None])
def test_signal_that_ends_no_system_call_is_passed_on(output_max, soon, tmp_path):
    """One that comes between a look for signals and a read, as it may; here one that another thread gets."""
    told = []

    def check():
        if not told and (tmp_path / "ready").exists():
            told.append(signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))

    ending = run(f"trap 'exit 3' USR1; : > {tmp_path}/ready; {AWAIT_SIGNAL}", check, output_max=output_max)
    assert ending.status == 3
    assert ending.passed == {signal.SIGUSR1}


def test_signals_are_handled_as_before_after_the_command():
    before = [signal.getsignal(getattr(signal, name)) for name in warden.PASSED]
    run("exit 0")
    assert [signal.getsignal(getattr(signal, name)) for name in warden.PASSED] == before


class Guarded:
    """A command under a warden in a session of its own, with this test in the place of the holder."""

    def __init__(self, mode, text, patience=0, **settings):
        theirs, self.orders = os.pipe()
        report, reports = os.pipe()
        self.report = os.fdopen(report)
        command = [*warden.program(mode, theirs, reports, patience), "sh", "-c", text]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs, reports], start_new_session=True, stdout=subprocess.PIPE, **settings
        )
        os.close(theirs)
        os.close(reports)

    def line(self):
        return self.process.stdout.readline()

    def order(self, *orders):
        os.write(self.orders, bytes(orders))

    def close(self):
        if self.orders >= 0:
            os.close(self.orders)
            self.orders = -1

    def end(self):
        """The rest of the output, and of the report."""
        rest = self.process.stdout.read(), self.report.read()
        self.process.wait(PATIENCE_S)
        return rest


@pytest.fixture
def guarded():
    started = []

    def start(*words, **settings):
        started.append(Guarded(*words, **settings))
        return started[-1]

    yield start
    for each in started:
        each.close()
        each.end()
        each.process.stdout.close()
        each.report.close()


def test_signal_that_the_whole_group_has_got_is_not_passed_on_once_more(guarded):
    child = guarded("held", f"trap 'echo int' INT; trap 'echo end; exit' USR1; kill -INT 0; {AWAIT_SIGNAL}")
    assert child.line() == b"int\n"
    child.order(signal.SIGINT, signal.SIGUSR1)
    assert child.end()[0] == b"end\n"


def test_signal_that_comes_a_second_time_is_passed_on(guarded):
    child = guarded("held", f"trap 'echo int' INT; trap 'echo end; exit' USR1; kill -INT 0; {AWAIT_SIGNAL}")
    assert child.line() == b"int\n"
    child.order(signal.SIGINT, signal.SIGINT)
    assert child.line() == b"int\n"
    child.order(signal.SIGUSR1)
    assert child.end()[0] == b"end\n"


def test_signal_ignored_from_the_start_stays_ignored(guarded):
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    child = guarded("held", "kill -HUP $$; kill -HUP $PPID; echo still here", preexec_fn=ignore)
    assert child.end()[0] == b"still here\n"


def test_command_and_its_processes_are_killed_when_the_orders_end(guarded):
    child = guarded("held", "sh -c 'sleep 600 & echo $!'; sleep 600 & echo $!; wait")
    pids = numbers(child.line()) + numbers(child.line())
    child.close()
    child.end()
    wait_until_gone(pids)


def test_command_whose_warden_is_killed_is_killed_with_it(tmp_path):
    with pytest.raises(FscoordError, match=r"the warden of the command.*was killed"):
        run(f"echo $$ > {tmp_path}/pid; kill -9 $PPID; exec sleep 60", output_max=None)
    wait_until_gone([int((tmp_path / "pid").read_text())])


LEAVE = "sleep 600 & echo $!; setsid sh -c 'sleep 600 & echo $!; wait' & echo $!; "
"""Leaves three processes, one of them a daemon's child, and says their numbers."""


@pytest.mark.parametrize("mode", ["held", "alone", "worker"])
def test_command_whose_warden_is_killed_leaves_no_process(guarded, mode, tmp_path):
    os.mkfifo(tmp_path / "go")
    child = guarded(mode, f"{LEAVE} read go < {tmp_path}/go; kill -9 $PPID; exec sleep 600")
    pids = [number for _ in range(3) for number in numbers(child.line())]
    assert all(map(is_there, pids))
    (tmp_path / "go").write_text("go\n")
    out, report = child.end()
    assert (out, child.process.returncode) == (b"", -signal.SIGKILL)
    assert "status" not in report
    assert not [pid for pid in pids if is_there(pid)]  # before anybody was told


@pytest.mark.parametrize("mode", ["held", "alone", "worker"])
def test_command_whose_guard_is_killed_leaves_no_process(guarded, mode):
    child = guarded(mode, LEAVE + "exec sleep 600")
    pids = [number for _ in range(3) for number in numbers(child.line())]
    child.process.kill()
    _, report = child.end()
    assert '{"status": -9}' in report.splitlines()
    assert not [pid for pid in pids if is_there(pid)]


@pytest.mark.parametrize("mode", ["held", "alone", "worker"])
def test_command_that_stops_its_warden_leaves_no_process_when_the_orders_end(guarded, mode):
    """The guard kills the warden, which reads no order, and then all that it leaves."""
    child = guarded(mode, f"kill -STOP $PPID; {LEAVE} exec sleep 600")
    pids = [number for _ in range(3) for number in numbers(child.line())]
    child.close()
    out, report = child.end()
    assert (out, child.process.returncode) == (b"", -signal.SIGKILL)
    assert "status" not in report
    assert not [pid for pid in pids if is_there(pid)]


def test_command_that_kills_its_whole_group_leaves_no_process(tmp_path):
    code = f"""if True:
        import os
        from fscoord.launch import run_held
        there = "setsid sh -c 'echo $$ > far; exec sleep 600' & sleep 600 & echo $! > near"
        text = "cd {tmp_path}; " + there + "; until [ -s far ]; do sleep 0.01; done; kill -9 0"
        run_held(["sh", "-c", text], dict(os.environ), lambda: None, grace=1)
    """
    done = subprocess.run([sys.executable, "-c", code], start_new_session=True, timeout=PATIENCE_S)
    assert done.returncode == -signal.SIGKILL
    wait_until_gone(numbers((tmp_path / "far").read_text() + (tmp_path / "near").read_text()))


def test_guard_is_not_ended_by_signals_that_a_whole_job_gets(guarded):
    child = guarded("held", "trap 'echo told; exit 3' TERM; echo ready; " + AWAIT_SIGNAL)
    child.line()
    for name in warden.PASSED:
        os.kill(child.process.pid, getattr(signal, name))
    child.order(signal.SIGTERM)
    assert child.end()[0] == b"told\n"
    assert child.process.returncode == 0


def test_command_has_no_signal_blocked():
    ending = run_held(
        ["grep", "SigBlk", "/proc/self/status"], dict(os.environ), lambda: None, grace=1, output_max=OUTPUT_MAX
    )
    assert int(ending.output.split()[1], 16) == 0


def test_processes_left_by_a_command_are_waited_for(tmp_path):
    ending = run(f"(sleep 0.1; echo behind > {tmp_path}/said) & exit 5", output_max=None)
    assert ending.status == 5
    assert (tmp_path / "said").read_text() == "behind\n"


def test_processes_left_by_a_command_are_not_waited_for_if_requested(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    ending = run(
        f"cd {tmp_path}; (read go < fifo; echo $go > said) > /dev/null & echo $! > pid; exit 5",
        leaves_rest=True,
        output_max=None,
    )
    assert ending.status == 5
    pid = int((tmp_path / "pid").read_text())
    assert is_there(pid)
    (tmp_path / "fifo").write_text("on\n")
    wait_until_gone([pid])
    assert (tmp_path / "said").read_text() == "on\n"


def test_signal_after_the_end_of_the_command_goes_to_the_processes_it_left(guarded):
    child = guarded("held", f"sh -c \"trap 'echo usr1; exit' USR1; echo ready; {AWAIT_SIGNAL}\" & exit 4")
    child.line()
    assert "pid" in child.report.readline()
    assert child.report.readline() == '{"status": 4}\n'
    child.order(signal.SIGUSR1)
    assert child.end()[0] == b"usr1\n"


def when(path, error):
    """A check that raises `error` once `path` is there."""

    def check():
        if path.exists():
            raise error

    return check


@pytest.mark.parametrize(
    "error", [LockLostError("it was taken"), StoreGoneError("it was taken"), SessionDeadError("it was taken")], ids=repr
)
def test_command_and_all_its_processes_get_sigterm_when_the_hold_is_lost(soon, tmp_path, error):
    loop = f"trap 'echo told >> said; exit' TERM; echo x >> ready; {AWAIT_SIGNAL}"
    text = f'cd {tmp_path}; trap "echo told >> said; exit 0" TERM; sh -c "{loop}" & '
    text += f"until [ -e ready ]; do sleep 0.01; done; touch lost; {AWAIT_SIGNAL}"
    with pytest.raises(LockLostError, match="the command was stopped: it was taken"):
        run(text, when(tmp_path / "lost", error))
    assert (tmp_path / "said").read_text() == "told\ntold\n"


def test_command_that_ignores_the_loss_of_its_hold_is_killed_after_the_grace(soon, tmp_path):
    text = f"cd {tmp_path}; trap 'echo deaf > said' TERM; echo $$ > pid; touch lost; {AWAIT_SIGNAL}"
    with pytest.raises(LockLostError):
        run(text, when(tmp_path / "lost", LockLostError("it was taken")), grace=0.1)
    wait_until_gone([int((tmp_path / "pid").read_text())])


def test_command_that_stops_its_warden_is_killed_when_the_hold_is_lost(soon, tmp_path):
    text = f"cd {tmp_path}; kill -STOP $PPID; echo $$ > pid; touch lost; exec sleep 600"
    with pytest.raises(LockLostError):
        run(text, when(tmp_path / "lost", LockLostError("it was taken")), grace=0.1)
    wait_until_gone([int((tmp_path / "pid").read_text())])


def test_hold_is_not_called_lost_while_the_store_does_not_answer(soon, caplog, tmp_path):
    looks = []

    def check():
        looks.append("a look")
        if len(looks) == 3:
            (tmp_path / "asked").touch()
        raise StoreTimeoutError("no answer")

    assert run(f"until [ -e {tmp_path}/asked ]; do sleep 0.01; done", check).status == 0
    assert [record.getMessage() for record in caplog.records] == ["the check of the hold failed: timeout: no answer"]


def test_command_is_stopped_without_an_answer_for_as_long_as_the_hold_lasts():
    def check():
        raise StoreTimeoutError("no answer")

    with pytest.raises(LockLostError, match=r"the hold could not be renewed for most of its lease of 0\.2 s"):
        run("exec sleep 600", check, patience=0.2)


def test_holder_that_is_stopped_is_not_waited_for_longer_than_its_hold_lasts(guarded):
    child = guarded("held", "sleep 600", patience=0.1)
    assert '{"lost": true}' in child.end()[1].splitlines()


def test_processes_get_sigterm_before_they_are_killed(monkeypatch):
    sent = []
    monkeypatch.setattr(warden, "_descendants", lambda: [1, 2])
    monkeypatch.setattr(warden, "_send", lambda pids, number: sent.append((pids, number)))
    with open(os.devnull, "wb") as nowhere:
        guard = warden._Warden("held", 0, nowhere.fileno(), 8, -1)
        assert [guard._has_expired(missed) for missed in (0, 1, 2, 0, 3)] == [False, False, False, False, True]
    assert sent == [([1, 2], signal.SIGTERM)]


def test_look_that_was_answered_is_a_sign_of_life(soon):
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as orders, held._HoldMonitor(lambda: None, writer, 1.0, 600.0):
        assert orders.read(2) == bytes([warden.ALIVE, warden.ALIVE])


def test_look_that_is_stuck_is_not_waited_for_and_writes_nowhere_afterwards(soon, monkeypatch, tmp_path):
    monkeypatch.setattr(held, "LAST_CHECK_S", 0.01)
    started, goes_on = threading.Event(), threading.Event()

    def check():
        (tmp_path / "looks").touch()
        started.set()
        assert goes_on.wait(PATIENCE_S)

    assert run(f"until [ -e {tmp_path}/looks ]; do sleep 0.01; done", check).status == 0
    assert started.is_set()
    with open(tmp_path / "other", "wb") as other:  # it may have the number of what was closed
        duplicates = [os.dup(other.fileno()) for _ in range(8)]
        goes_on.set()
        until(lambda: not any(thread.name == "fscoord-hold" for thread in threading.enumerate()))
    for each in duplicates:
        os.close(each)
    assert (tmp_path / "other").read_bytes() == b""


def test_watchdog_begins_anew_at_a_sign_of_life_and_counts_no_quarter_twice():
    now = [0.0]
    watchdog = warden.Watchdog(8, clock=lambda: now[0])

    def at(time):
        now[0] = time
        return watchdog.missed()

    assert [at(1), at(2), at(3), at(4.5)] == [0, 1, 0, 2]
    assert watchdog.left() == 2
    watchdog.beat()
    assert [at(6), at(6.5), at(700), at(701), at(702)] == [0, 1, 2, 0, 3]
    assert warden.Watchdog(0).left() is None
    assert warden.Watchdog(0).missed() == 0


def test_command_with_too_much_output_is_ended():
    with pytest.raises(LimitExceededError, match="more than 10000 bytes"):
        run("while :; do echo more and more; done")
