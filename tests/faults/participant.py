"""A participant of a run: `participant.py PATH RUN RANK WORLD_SIZE END [OPTION=VALUE...]`.

It opens the store, prints the keys that it found, sets a key of its own to RUN, prints `ready` and ends as END says;
with `gated=1` after a line of input. The ends that need a
signal wait for it, or for a key that never comes. `exchange` calls `synchronize` and prints the values.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
from typing import Any

from fscoord import FileStore, FscoordError, Store, synchronize


def say(*words: object) -> None:
    print(*words, flush=True)


def opened(path: str, run: str, rank: int, size: int, options: dict[str, Any]) -> FileStore:
    """Open the store, or print the error and exit with 3."""
    gated = options.pop("gated", "0")
    try:
        store = FileStore(path, size or None, timeout=60, **options)
        say("found", *store.list_keys())
        store.set(f"rank {rank}", run)
    except (FscoordError, ValueError) as error:
        say(type(error).__name__, error)
        sys.exit(3)
    say("ready")
    if gated == "1":
        input()
    return store


def work(store: Store, end: str, run: str, rank: int, size: int) -> None:
    """Do what `end` says while the store is open."""
    if end == "exchange":
        say("read", *(each.decode() for each in synchronize(store, run.encode(), rank, size, "addresses/")))
    elif end == "raise":
        raise KeyError(run)
    elif end.startswith("exit"):
        sys.exit(int(end[4:]))
    elif end == "os._exit":
        os._exit(0)
    elif end == "execv":
        os.execv("/bin/true", ["true"])
    elif end == "idle":
        input()
        store.get(f"rank {rank}")
    elif end == "wait":
        store.wait(["never"], timeout=60)
    elif end == "inherited":  # a child has a handle on the store, uses it, fails, and dies
        pid = os.fork()
        if not pid:
            store.set("child", "1")
            try:
                raise ValueError
            except ValueError:
                store.close()
            os._exit(1)
        os.waitpid(pid, 0)
    elif end == "clone":
        with contextlib.suppress(ValueError), store.clone() as twin:
            twin.set("clone", "1")
            raise ValueError


def child(arguments: list[Any], end: str) -> None:
    path, run, rank, size, options = arguments
    with opened(path, run, rank, size, options) as store:
        work(store, end, run, rank, size)


def main() -> None:
    path, run, rank, size, end = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    options: dict[str, Any] = dict(option.split("=") for option in sys.argv[6:])
    if options.pop("named", "1") == "1":
        options["rank"] = rank
    way, _, rest = end.partition(":")
    if way in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(way)
        process = context.Process(target=child, args=([path, run, rank, size, options], rest))
        process.start()
        process.join(60)
        return
    open_it = functools.partial(opened, path, run, rank, size, options)
    if way == "finally":
        store = open_it()
        try:
            work(store, rest, run, rank, size)
        finally:
            store.close()
    elif way == "unclosed":
        work(open_it(), rest, run, rank, size)
    elif way == "generator":

        def steps() -> Any:
            with open_it():
                yield

        generator = steps()
        next(generator)
        generator.close()
    elif way == "handled":  # the store is opened and closed while an older exception is handled
        try:
            raise ValueError
        except ValueError:
            with open_it():
                pass
    else:
        with open_it() as store:
            work(store, end, run, rank, size)


if __name__ == "__main__":
    main()
