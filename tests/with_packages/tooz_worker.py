"""A member of a group of tooz, in a process of its own: it says what it has, and keeps it until it gets a line.

``python tooz_worker.py member URL ID``: joins the group, leads it and holds the lock.
``python tooz_worker.py count URL ID FILE N``: adds 1 to the number in the file N times, under the lock.
"""

import sys
from pathlib import Path

from tooz import coordination


def main(role: str, url: str, member: str, *more: str) -> None:
    coordinator = coordination.get_coordinator(url, member.encode())
    coordinator.start()
    lock = coordinator.get_lock(b"lock")
    if role == "member":
        coordinator.join_group_create(b"group", {"role": "victim"})
        coordinator.watch_elected_as_leader(b"group", lambda event: None)
        coordinator.run_watchers()
        assert lock.acquire()
    print("ready", flush=True)
    sys.stdin.readline()
    if role == "count":
        file, times = Path(more[0]), int(more[1])
        for _ in range(times):
            with lock:
                file.write_text(str(int(file.read_text()) + 1))
    coordinator.stop()


main(*sys.argv[1:])
