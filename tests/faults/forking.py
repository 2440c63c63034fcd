"""Fork a process while another of its threads stands still at a chosen point of an operation.

The points are the calls of the system (`Seam`), each just before it is made, and the places at which CPython lets
another thread run: as for signals (see `support.interrupts`), when it enters a function and after a call of a C
function, but in the standard library, too. Between them they are all the moments at which a fork can find a thread: it
is in a call that has let go of the interpreter, or where it lost the interpreter to the thread that forks.

Three processes take part. The *parent* has the stores and the thread, and is itself a fork of the test's process. Its
*child* has the parent's handles and none of its threads. The test's process is the outsider whose writes must get
through whatever the two do.
"""

from __future__ import annotations

import _thread
import ctypes
import gc
import inspect
import json
import linecache
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from support.internals import log_of

from fscoord import FileStore, FscoordError, StoreTimeoutError
from fscoord._log.locking import kernel_wait, log_lock
from fscoord._runtime import system

LOGGING = find_spec("logging").origin or ""  # type: ignore[union-attr]
"""The source of `logging`, which is not imported here: `first_worker` needs a process that has not done so."""
HANG_S = 60
SOON_S = 0.05
"""The deadline of what a child does while it may not get the lock."""
SLACK_S = 30
"""How far past its deadline a call may end before it counts as one that has none."""
BYSTANDERS = 3
"""Threads that do nothing. Without any, glibc gives the first thread of a child the stack, and so the identity, of the
thread that is gone; a re-entrant lock which that one held then lets it in by luck."""

Operation = Callable[[FileStore], Any]
Stop = Callable[[str], None]
Fork = Callable[[], int]


def fork_in_c() -> int:
    """fork(2) as a library in C calls it: Python's hooks don't run, and it does not know."""
    return int(ctypes.PyDLL(None).fork())


class Seam(ModuleType):
    """What stands for `os`, `fcntl`, `time` or `select` under the package: it calls `stop` before each call."""

    def __init__(self, real: Any, stop: Stop) -> None:
        super().__init__(real.__name__)
        self._real, self._stop = real, stop

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if not inspect.isbuiltin(real):
            return real
        stop = self._stop

        def call(*arguments: Any, **named: Any) -> Any:
            stop(name)
            return real(*arguments, **named)

        return call


class Gate:
    """Where threads stand still, in a system call: at a fork in C none may be about to take Python's own lock."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self._waiting: list[int] = []

    def wait(self) -> None:
        self._waiting.append(threading.get_native_id())
        os.read(self._reader, 1)

    def await_all(self, count: int) -> None:
        """Return when so many threads stand here."""
        in_call = f" {self._reader:#x} "  # its first argument, proc_pid_syscall(5)
        until(lambda: len(self._waiting) >= count)
        for task in self._waiting:
            until(lambda: in_call in Path(f"/proc/self/task/{task}/syscall").read_text())  # noqa: B023 - called at once

    def open(self) -> None:
        os.write(self._writer, b"x" * len(self._waiting))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "that never came"
        time.sleep(0.0005)


class Moment:
    """The moment to fork: the `number`-th point of whatever threads other than the main one do.

    `skipped` is the path of a module whose lines are no points.
    """

    def __init__(self, number: int, skipped: str = "") -> None:
        self._skipped = {__file__, skipped}
        self._left = self._number = number
        self._mutex = threading.Lock()
        self.reached, self.gate = threading.Event(), Gate()
        self.where = ""
        self.is_beside_listing = False
        self.counts_main_thread = self.is_over = False

    @property
    def count(self) -> int:
        """How many points there were so far."""
        return self._number - self._left

    def stop_at_call(self, name: str) -> None:
        """Stop the thread that calls this if it is its turn."""
        is_main = threading.current_thread() is threading.main_thread()
        if self.is_over or (is_main and not self.counts_main_thread):
            return
        with self._mutex:
            self._left -= 1
            is_it = self._left == 0
        if is_it:
            frame = inspect.currentframe()
            while frame is not None and "/fscoord/" not in frame.f_code.co_filename:
                frame = frame.f_back
            where = "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            self.stop(f"{name} in {where}")

    def stop(self, where: str) -> None:
        """Stop this thread until the parent lets it go on."""
        self.where = where
        self.reached.set()
        self.gate.wait()

    def do(self, operation: Callable[[], Any], *, at_calls: bool) -> Any:
        """Return the result of `operation`; count its points here, unless its calls are counted."""
        if at_calls:
            return outcome(operation)
        sys.setprofile(self._event)
        try:
            return outcome(operation)
        finally:
            sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if self.reached.is_set() or event not in ("call", "c_return") or frame.f_code.co_filename in self._skipped:
            return
        self._left -= 1
        if self._left == 0:
            self.stop(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name} {event}")


def outcome(operation: Callable[[], Any]) -> str:
    """Return in words what becomes of `operation`."""
    try:
        operation()
    except FscoordError as error:
        return type(error).__name__
    except BaseException:
        return traceback.format_exc()
    return "done"


class Case(NamedTuple):
    """What is forked beside.

    Attributes:
        path: the log.
        operation: what the thread does.
        condition: is called with the handle that it uses and another one before.
        at_calls: whether the points are calls of the system.
        fork: the way of forking.
        parent_dies: whether the parent is killed right after it has forked.
        closes: whether the first thing that the child does is to close its handle.
        within: whether the thread itself forks, as in a signal handler, and goes on in both processes.
        blocks: whether the parent holds the log's lock by another handle, so that the thread has to wait for it.
        options: for the handles.
    """

    path: Path
    operation: Operation
    condition: Callable[[FileStore, FileStore], None]
    at_calls: bool = True
    fork: Fork = os.fork
    parent_dies: bool = False
    closes: bool = False
    within: bool = False
    blocks: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it


class Ends(NamedTuple):
    """The pipes between the outsider and one of the two others."""

    reader: int
    writer: int

    def tell(self, *what: Any) -> None:
        os.write(self.writer, json.dumps(what).encode() + b"\n")

    def hear(self) -> list[Any]:
        """Return what the other says next; an empty list is that all is well."""
        said = b""
        while not said.endswith(b"\n"):
            ready, _, _ = select.select([self.reader], [], [], 2 * HANG_S)
            assert ready, "it says nothing: it hangs"
            part = os.read(self.reader, 1 << 16)
            if not part:
                return ["it died, or hung until its alarm"]
            said += part
        return list(json.loads(said))

    def hear_end(self) -> None:
        """Return when the other process has ended; ignore its last output."""
        ended = False
        while not ended:
            ready, _, _ = select.select([self.reader], [], [], 2 * HANG_S)
            assert ready, "it has been killed, or was to end by its alarm, and lives"
            ended = not os.read(self.reader, 1 << 16)


def pipes() -> tuple[Ends, Ends]:
    one, other = os.pipe(), os.pipe()
    return Ends(one[0], other[1]), Ends(other[0], one[1])


def in_parent(case: Case, moment: Moment, outside: Ends, for_child: Ends) -> None:
    """Do in the parent what `case` says; fork at the `moment`.

    No garbage is collected meanwhile: in a child that is forked beside a collection Python never collects again.
    """
    gc.disable()
    unknown = _thread._count() - len(threading.enumerate())
    bystanders = Gate()
    for _ in range(BYSTANDERS):
        threading.Thread(target=bystanders.wait, daemon=True).start()
    bystanders.await_all(BYSTANDERS)
    store = FileStore(case.path, timeout=HANG_S, **case.options)
    other = FileStore(case.path, timeout=HANG_S, **case.options)
    case.condition(store, other)
    log_of(store).handle.path_checked_at = 0.0  # so that it looks whether the file is still there, too
    log_lock.NAP_PHASE_S = 0  # type: ignore[misc]  # so that whoever waits for the lock asks the kernel for it
    if case.blocks:
        log_of(other).handle.lock.try_lock()
    ended: list[str] = []
    thread = threading.Thread(
        target=lambda: ended.append(moment.do(lambda: case.operation(store), at_calls=case.at_calls)), daemon=True
    )
    if case.at_calls:
        put_seam(moment)
    thread.start()
    while not moment.reached.wait(0.001) and thread.is_alive():
        if case.blocks and is_in_line():
            break  # it has made all its calls but for those that come with the lock
    if case.blocks and not moment.reached.is_set():
        log_of(other).handle.lock.unlock()
        moment.reached.wait(0.001)
    while not moment.reached.wait(0.001) and thread.is_alive():
        pass
    if moment.reached.is_set():
        moment.gate.await_all(1)
    if case.fork is fork_in_c:
        await_bare_threads(unknown)
    pid = fork_alone(case, moment)
    if not pid:
        in_child(case, moment, store, for_child)
    outside.tell(moment.count, moment.where, pid)
    if case.parent_dies:
        os.kill(os.getpid(), signal.SIGKILL)
    outside.hear()
    log_of(other).handle.lock.unlock()
    moment.gate.open()
    thread.join(HANG_S)
    outside.tell(ended)
    outside.hear()


def fork_alone(case: Case, moment: Moment) -> int:
    """Fork, and record whether another thread is just then in a call that reads a directory.

    Nobody takes the interpreter from this thread meanwhile. CPython opens the directory in that call, and a child of
    the fork keeps the descriptor: docs/contributors/forks.md, "What can't be had".
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(HANG_S)
    try:
        moment.is_beside_listing = any(map(is_listing, sys._current_frames().values()))
        return case.fork()
    finally:
        sys.setswitchinterval(interval)


def is_listing(frame: FrameType | None) -> bool:
    """Return whether a thread with the innermost frame `frame` is in a line of the package that reads a directory."""
    while frame is not None and "/fscoord/" not in frame.f_code.co_filename:
        frame = frame.f_back
    line = "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return "listdir" in line or "scandir" in line


def await_bare_threads(unknown: int) -> None:
    """Return when the bare threads of the package have ended, of which `threading` does not know.

    They import and start threads, and run while others stand still. A fork in C beside a thread that runs may leave the
    interpreter's own lock (GIL) waiting for that thread, so that nothing runs in the child. CPython renews this lock
    after `os.fork` only. What the library can do beside an import is tested in `faults/test_first_uses.py`.

    Args:
        unknown: how many threads `threading` did not know before the package started any.
    """
    until(lambda: _thread._count() - len(threading.enumerate()) <= unknown)


def fork_within(case: Case, moment: Moment, outside: Ends, for_child: Ends) -> None:
    """As `in_parent`, but the thread that is at the `moment` forks itself, and goes on in both processes."""
    store, other = (FileStore(case.path, timeout=HANG_S, **case.options) for _ in range(2))
    case.condition(store, other)
    log_of(store).handle.path_checked_at = 0.0
    children: list[int] = []

    def fork(where: str) -> None:
        moment.where = where
        children.append(case.fork())

    moment.stop = fork  # type: ignore[method-assign]
    moment.counts_main_thread = True
    put_seam(moment)
    ended = outcome(lambda: case.operation(store))
    moment.counts_main_thread = False
    if children == [0]:
        in_child(case, moment, store, for_child, ended)
    is_child_needed = not children
    if is_child_needed:
        children.append(os.fork())
        if not children[0]:
            in_child(case, moment, store, for_child)
    outside.tell(moment.count, moment.where, children[0])
    outside.hear()
    outside.tell([ended])
    outside.hear()


def put_seam(moment: Moment) -> None:
    """Have the calls of the package counted."""
    for name in ("os", "fcntl", "time", "select"):
        setattr(system, name, Seam(getattr(system, name), moment.stop_at_call))


def is_in_line() -> bool:
    """Return whether a thread of this process is about to wait in the kernel for a lock, or does."""
    return any(request.fd >= 0 for request in list(kernel_wait._requests.values()))


def in_child(case: Case, moment: Moment, store: FileStore, outside: Ends, ended: str = "done") -> None:
    """Do in the child what it must be able to, and say how it went; `ended`: so did what it was forked in."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(HANG_S)
        moment.is_over = True
        gc.enable()
        if case.within:
            outside.tell(*([ended] if " " in ended else []))  # it may be any error of ours
        elif not case.parent_dies:
            wrong = close_at_once(store) if case.closes else try_soon(store)
            store = open_again_if_closed(case, store)
            outside.tell(*wrong, *in_line(store))
        outside.hear()
        outside.tell(*go_on(case, moment, open_again_if_closed(case, store)))
        outside.hear()
    finally:
        os._exit(0)


def open_again_if_closed(case: Case, store: FileStore) -> FileStore:
    """Return another handle if `store` was closed just now, or the parent's thread has closed it or was about to."""
    return FileStore(case.path, timeout=HANG_S, **case.options) if log_of(store).handle.final_error[1] else store


def try_soon(store: FileStore) -> list[str]:
    """Try what a child may do beside a parent that holds the lock; return what went wrong."""
    store.set_timeout(SOON_S)
    wrong = []
    for name, call in {
        "check": lambda: store.check(["k"]),
        "set": lambda: store.set("of the child", "soon"),
        "wait": lambda: store.wait(["never"], SOON_S),
        "members": store.members,
    }.items():
        started = time.monotonic()
        said = outcome(call)
        if said not in ("done", "StoreTimeoutError", "StoreClosedError"):
            wrong.append(f"{name}: {said}")
        if time.monotonic() - started > SOON_S + SLACK_S:
            wrong.append(f"{name} took {time.monotonic() - started:.1f} s")
    return wrong


def close_at_once(store: FileStore) -> list[str]:
    said = outcome(store.close)
    return [] if said == "done" else [f"close: {said}"]


def in_line(store: FileStore) -> list[str]:
    """Begin a write that waits for as long as the parent has the lock; return when it does, or has been done.

    For a lock that the kernel knows nothing of, a thread waits by trying again and again.
    """
    store.set_timeout(HANG_S)
    said: list[str] = []
    tries_again = threading.Event()
    wait = log_lock.LogLock.wait

    def note(lock: log_lock.LogLock, *arguments: Any, **named: Any) -> None:
        if not lock.can_block:
            tries_again.set()
        wait(lock, *arguments, **named)

    log_lock.LogLock.wait = note  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: said.append(outcome(lambda: store.set("of the child", "waited"))))
    thread.start()
    while thread.is_alive() and not is_in_line() and not tries_again.is_set():
        thread.join(0.001)
    return [] if said in ([], ["done"]) else said


def go_on(case: Case, moment: Moment, store: FileStore) -> list[str]:
    """All locks are free now: return the errors that still occur."""
    try:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
                assert store.get("of the child") == b"waited"
        store.set_timeout(HANG_S)
        store.set("of the child", "1")
        assert store.get("of the child") == b"1"
        with FileStore(case.path, timeout=HANG_S, **case.options) as fresh:
            assert fresh.list_keys() == store.list_keys()
            fresh.set("fresh", "1")
            assert store.get("fresh") == b"1"
            try:
                store.wait(["never"], 0.01)
            except StoreTimeoutError:
                pass
        store.compact()
        assert store.add("compacted", 1) == 1
        store.close()
    except BaseException:
        return [traceback.format_exc()]
    gc.collect()  # what waits share is closed when it is thrown away
    deadline = time.monotonic() + SLACK_S
    while kernel_wait._requests and time.monotonic() < deadline:  # the thread that asked the kernel closes what it has
        time.sleep(0.001)
    kept = open_files(case.path.parent)
    if moment.is_beside_listing:
        kept = [name for name in kept if name != str(case.path.parent)]
    is_closing = moment.where.startswith("close ")  # the thread has forgotten that one, so that nobody else closes it
    return [f"left open: {kept}"] if len(kept) > is_closing else []


def open_files(directory: Path) -> list[str]:
    """Return the files below `directory`, and the instances of inotify, that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(str(directory)) or target.endswith(":inotify"):
            found.append(target)
    return found


def fork_at(case: Case, number: int) -> int:
    """Fork at point `number`, or at the end; return how many points there were. A fault is an `AssertionError`."""
    near_parent, far_parent = pipes()
    near_child, far_child = pipes()
    pid = os.fork()
    if not pid:
        # A thread that starts another holds a lock of `threading`, which Python renews in a child unless C has forked.
        # os.fork() waits for the lock of `logging`, and so for ever for a thread that stands still with it.
        skipped = threading.__file__ if case.fork is fork_in_c else LOGGING
        be_parent(case, Moment(number, skipped), far_parent, far_child)
    for end in (*far_parent, *far_child):
        os.close(end)
    child = 0
    try:
        count, where, child = near_parent.hear()
        assert count is not None, where
        judge(case, f"fork at point {number}, {where}", pid, near_parent, near_child)
    finally:
        os.kill(pid, signal.SIGKILL)
        if child:
            os.kill(child, signal.SIGKILL)
        os.waitpid(pid, 0)
        near_child.hear_end()
        for end in (*near_parent, *near_child):
            os.close(end)
    return int(count)


def be_parent(case: Case, moment: Moment, outside: Ends, for_child: Ends) -> None:
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(2 * HANG_S)
        (fork_within if case.within else in_parent)(case, moment, outside, for_child)
    except BaseException:
        outside.tell(None, traceback.format_exc(), 0)
    finally:
        os._exit(0)


def judge(case: Case, what: str, pid: int, parent: Ends, child: Ends) -> None:
    if case.parent_dies:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    else:
        wrong = child.hear()
        assert wrong == [], f"{what}: {wrong}"
        parent.tell("go on")
        ended = parent.hear()
        assert ended in ([["done"]], [["StoreTimeoutError"]]), f"{what}: {ended or 'the parent hangs, or died'}"
    if not (case.parent_dies and case.fork is fork_in_c):  # that child has not had a chance to close anything
        write_from_outside(case, what)
    child.tell("go on")
    said = child.hear()
    assert said == [], f"{what}: {said}"
    write_from_outside(case, what)


def write_from_outside(case: Case, what: str) -> None:
    """The child lives, and does nothing: it must not keep anybody from anything."""
    try:
        with FileStore(case.path, timeout=SLACK_S, **case.options) as store:
            store.add("outside", 1)
            answers = {member.alive for member in store.members() if member.pid == os.getpid()}
    except StoreTimeoutError as error:
        raise AssertionError(f"{what}: others are locked out: {error}") from error
    assert answers <= {"yes", "no" if store.has_liveness else "unknown"}, what
