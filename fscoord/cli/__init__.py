"""The entry point of the command ``fscoord``.

This module itself imports neither click nor rich, so it can report that click or rich is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from fscoord._runtime.signals import resend_lost_signals


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave the process with its exit code.

    Args:
        arguments: the words after ``fscoord``; by default the arguments of this process.
    """
    try:
        with resend_lost_signals():
            from fscoord.cli.app import run

            code = run(arguments)
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.stderr.write("fscoord: the command line needs click and rich: pip install 'fscoord[cli]'\n")
        sys.exit(69)  # EX_UNAVAILABLE of sysexits.h: "a support program or file does not exist"
    except KeyboardInterrupt:
        code = 130
    # CPython notes whether Ctrl-C ended the last `exec` of text. If so, a process that was started with -m ends by
    # SIGINT, whatever code is passed to `exit`. `dataclass` calls `exec` so. This empty `exec` resets the note.
    exec("")  # noqa: S102
    sys.exit(code)
