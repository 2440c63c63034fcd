"""A client of Dask in a process of its own: for each line that it gets, it computes, and says on which scheduler.

``python dask_client.py ADDRESS``; a line is the number of workers to wait for. It says the sum of ten squares, how many
processes computed them, and the scheduler's address.
"""

import os
import sys

from distributed import Client


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def main(address: str) -> None:
    with Client(address, timeout=60) as client:
        print("ready", flush=True)
        for line in sys.stdin:
            client.wait_for_workers(int(line), timeout=60)
            results = client.gather(client.map(square, range(10), pure=False))
            print(sum(each for each, _ in results), client.scheduler_info()["address"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
