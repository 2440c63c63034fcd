"""The command ``fscoord``: arguments to calls, results to text and exit codes; it decides nothing itself.

This module only starts it, so that it can say what to install where click and rich are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from fscoord._runtime.signals import resend_lost_signals

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave the process with its exit code.

    Args:
        arguments: the words behind ``fscoord``; those of this process by default.
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
    # If Ctrl-C has come in an `exec` of text, such as makes each dataclass, a process that was started with -m would
    # end by SIGINT, whatever is said here: CPython goes by how the last of them ended.
    exec("")  # noqa: S102
    sys.exit(code)
