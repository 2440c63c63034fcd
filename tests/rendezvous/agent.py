"""A process that takes part in a rendezvous: it reports each outcome, and joins again when its round is over.

It ends in good order when its standard input ends.
"""

from __future__ import annotations

import json
import sys
import threading

from fscoord import RendezvousClosedError, RendezvousGracefulExit
from fscoord.rendezvous import RendezvousParameters, create_handler


def tell(**facts):
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main(path, least, most, interval, attempts):
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    params = RendezvousParameters(
        "c10d",
        path,
        "job",
        int(least),
        int(most),
        keep_alive_interval=interval,
        keep_alive_max_attempt=attempts,
        last_call_timeout="0.3",
    )
    with create_handler(params) as handler:
        try:
            while not over.is_set():
                info = handler.next_rendezvous()
                tell(round=handler.round, rank=info.rank, world=info.world_size, node=handler.node)
                while handler.is_current() and handler.num_nodes_waiting() == 0:
                    if over.wait(0.02):
                        break
        except (RendezvousClosedError, RendezvousGracefulExit) as error:
            tell(ended=type(error).__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
