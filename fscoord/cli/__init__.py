"""The command ``fscoord``: it turns arguments into calls, and results into text and exit codes.

This module only starts the command, so that it can name the missing packages if click or rich is not installed.
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
    # Each dataclass is made by an `exec` of text. If Ctrl-C comes in such an `exec`, a process that was started with -m
    # ends by SIGINT, whatever code is passed to `exit`: for CPython the end of the last `exec` of text decides.
    exec("")  # noqa: S102
    sys.exit(code)
