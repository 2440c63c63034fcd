"""A process for test_first_uses: it has imported nothing that fscoord imports only when it needs it.

Its arguments are what happens at a first use, the path of a log, and details.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from faults.forking import BYSTANDERS, HANG_S, Gate, fork_in_c, outcome

from fscoord import FileStore

NEEDED = "watchdog.observers.inotify_c"


class Slow:
    """A finder: a thread that imports what the first wait needs stops behind the module's code, and has its lock.

    With `finds_slowly` it stops in the finder itself. It has the lock of all imports there, which os.fork() waits for.
    """

    def __init__(self, *, finds_slowly: bool = False) -> None:
        self.gate = Gate()
        self._owner = os.getpid()
        self._finds_slowly = finds_slowly

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == NEEDED else None
        if spec is not None and self._finds_slowly:
            self.gate.wait()
        elif spec is not None and os.getpid() == self._owner:
            loader: Any = spec.loader
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self.gate.wait()

            loader.exec_module = exec_module
        return spec


def make_first_wait_slow(*, finds_slowly: bool = False) -> Slow:
    for name in [name for name in sys.modules if name.startswith("watchdog")]:
        del sys.modules[name]
    slow = Slow(finds_slowly=finds_slowly)
    sys.meta_path.insert(0, slow)
    return slow


def fork_beside_a_first_wait(path: str, fork: str, importer: str, where: str) -> None:
    """Print how a child's first wait ends that was forked while its parent's other thread imported what that needs."""
    slow = make_first_wait_slow(finds_slowly=where == "finder")
    store, other = FileStore(path), FileStore(path)
    wait = {"ours": lambda: store.wait(["it has ended"], HANG_S), "another": lambda: __import__(NEEDED)}[importer]
    bystanders = Gate()
    for _ in range(BYSTANDERS):
        threading.Thread(target=bystanders.wait, daemon=True).start()
    bystanders.await_all(BYSTANDERS)
    thread = threading.Thread(target=outcome, args=(wait,))
    thread.start()
    slow.gate.await_all(1)
    pid = fork_in_c() if fork == "C" else os.fork()
    if not pid:
        signal.alarm(HANG_S)
        print(outcome(lambda: store.wait(["never"], 0.2)), flush=True)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    slow.gate.open()
    other.set("it has ended", "1")
    thread.join(HANG_S)
    print(code, thread.is_alive(), NEEDED in sys.modules)


def fork_in_a_first_wait(path: str, fork: str) -> None:
    """Print how a first wait ends, in the child and in the parent, whose handler forks while the wait imports.

    The key that ends it comes in the handler, so that no wait is over before it imports.
    """
    slow, forked = make_first_wait_slow(), Gate()
    store, other = FileStore(path), FileStore(path)
    children: list[int] = []

    def act(_: int, __: object) -> None:
        other.set("forked", "1")
        forked.await_all(1)
        children.append(fork_in_c() if fork == "C" else os.fork())
        if children == [0]:
            signal.alarm(HANG_S)
        else:
            forked.open()

    def interrupt() -> None:
        slow.gate.await_all(1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        forked.wait()
        code = os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1])
        slow.gate.open()
        print(code, flush=True)

    signal.signal(signal.SIGUSR1, act)
    thread = threading.Thread(target=interrupt)
    thread.start()
    said = outcome(lambda: store.wait(["forked"], HANG_S))
    if children != [0]:
        thread.join(HANG_S)
    print(said, NEEDED in sys.modules, flush=True)
    if children == [0]:
        os._exit(0)


def exhaust_descriptors(path: str) -> None:
    """Print what becomes of operations that import something for the first time, and can open no file."""
    store = FileStore(path, compact_bytes=3000)
    store.set("a", "1")
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), most))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    said = set()
    for _ in range(100):  # until it would be compacted, and has something to warn of
        said.add(outcome(lambda: store.set("k", "x" * 60)))
        said.add(outcome(lambda: store.wait(["never"], 0.001)))
        said.add(outcome(store.members))
    for fd in held:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))
    print("logging" in sys.modules)
    print(" | ".join(sorted(said)))
    print(outcome(lambda: store.wait(["never"], 0.01)), outcome(store.compact), store.get("k") == b"x" * 60)


def use_in_a_subinterpreter(path: str) -> None:
    """Print what becomes of operations in an interpreter that allows no daemon threads."""
    code = f"""if True:
        import sys
        sys.path[:] = {sys.path!r}
        from fscoord import FileStore, FscoordError, StoreTimeoutError
        from fscoord.recipes import Lock
        said = []
        def do(name, call):
            try:
                call()
            except FscoordError as error:
                said.append(name + " " + type(error).__name__)
            except BaseException as error:
                said.append(name + " RAW " + repr(error))
            else:
                said.append(name + " done")
        held, store = FileStore({path!r}), FileStore({path!r}, timeout=0.2)
        do("set", lambda: store.set("k", "1"))
        do("get", lambda: store.get("k"))
        do("wait", lambda: store.wait(["never"], 0.01))
        do("compact", store.compact)
        do("lock", lambda: Lock(store, "l").acquire(timeout=0.1))
        do("lease", lambda: Lock(store, "m", ttl=5).acquire(timeout=0.1))
        held.get("k")
        held._log.handle.lock.try_lock()
        do("late", lambda: store.set("k", "2"))
        held._log.handle.lock.unlock()
        do("close", store.close)
        held.close()
        print(", ".join(said), flush=True)
    """
    _run_isolated(code)


def _run_isolated(code: str) -> None:
    if sys.version_info >= (3, 13):
        import _interpreters

        interpreter = _interpreters.create("isolated", reqrefs=False)
        failure = _interpreters.exec(interpreter, code)
        assert failure is None, failure
        _interpreters.destroy(interpreter)
        return
    import _xxsubinterpreters

    interpreter = _xxsubinterpreters.create(isolated=True)
    failure = _xxsubinterpreters.run_string(interpreter, code)
    assert failure is None, failure
    _xxsubinterpreters.destroy(interpreter)


{
    "fork": fork_beside_a_first_wait,
    "handler": fork_in_a_first_wait,
    "descriptors": exhaust_descriptors,
    "subinterpreter": use_in_a_subinterpreter,
}[sys.argv[1]](*sys.argv[2:])
