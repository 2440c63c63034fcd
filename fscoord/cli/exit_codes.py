"""The exit code of each exception, and the line that reports it.

If sysexits.h has a fitting code, the exit code is this code. The exit code of Ctrl-C is 128 plus the number of the
signal.
"""

from __future__ import annotations

import errno

import click

from fscoord import errors

FALSE = 1
USAGE = 64
DAMAGED = 65
UNAVAILABLE = 69
BUG = 70
IO = 74
TIMEOUT = 75
PERMISSION = 77
INTERRUPTED = 130

_FOREIGN_CALLS = "_ctypes"
_EXTRA = frozenset({"click", "rich", _FOREIGN_CALLS})


class OutputError(Exception):
    """A write to standard output failed. The cause is an `OSError`, or None if the process has no standard output."""


class HintedError(Exception):
    """Adds a `hint` for a user of the command to the error `cause`. The exit code is that of `cause`."""

    def __init__(self, cause: Exception, hint: str) -> None:
        super().__init__(cause, hint)
        self.cause = cause
        self.hint = hint


_CODES: tuple[tuple[type[BaseException], int], ...] = (
    # The first match counts: a StoreTimeoutError, for example, is an OSError too.
    (KeyboardInterrupt, INTERRUPTED),
    (click.Abort, INTERRUPTED),
    (click.ClickException, USAGE),
    (errors.QueueEmptyError, FALSE),
    (errors.RendezvousGracefulExit, 0),
    (errors.StoreTimeoutError, TIMEOUT),
    (errors.RendezvousTimeoutError, TIMEOUT),
    (errors.CorruptLogError, DAMAGED),
    (errors.RendezvousStateError, DAMAGED),
    (errors.StoreGoneError, UNAVAILABLE),
    (errors.StoreClosedError, UNAVAILABLE),
    (errors.StaleRunError, UNAVAILABLE),
    (errors.CompactedError, UNAVAILABLE),
    (errors.UnsupportedFilesystemError, UNAVAILABLE),
    (errors.BrokenBarrierError, UNAVAILABLE),
    (errors.BarrierError, USAGE),
    (PermissionError, PERMISSION),
    (OutputError, IO),
    (OSError, IO),
    (ValueError, USAGE),
    (OverflowError, USAGE),
    (errors.StoreError, IO),
    (errors.FscoordError, UNAVAILABLE),
)


def exit_code(error: BaseException) -> int:
    """Return the exit code of `error`; 70, a bug in fscoord, for an unexpected exception."""
    if isinstance(error, HintedError):
        return exit_code(error.cause)
    if _is_missing_extra(error):
        return UNAVAILABLE
    if isinstance(error, OSError) and error.errno in {errno.EACCES, errno.EPERM}:
        return PERMISSION
    return next((code for kind, code in _CODES if isinstance(error, kind)), BUG)


def is_silent(error: BaseException) -> bool:
    """Return whether `error` needs no message: a false condition, Ctrl-C, or a pipe that its reader has closed."""
    return exit_code(error) in {FALSE, INTERRUPTED} or (
        isinstance(error, OutputError) and isinstance(error.__cause__, BrokenPipeError)
    )


def message(error: BaseException) -> str:
    """Return the message of `error` as one line."""
    return " ".join(_words(error).split())


def _words(error: BaseException) -> str:
    if isinstance(error, HintedError):
        return f"{_words(error.cause)}; {error.hint}"
    if isinstance(error, click.ClickException):
        return error.format_message() + _hint(error)
    if isinstance(error, ImportError) and error.name == _FOREIGN_CALLS:
        return (
            "the verbs that run a command need the module _ctypes, and this Python was built without it: use another"
            " Python, or install the headers of libffi and build this one again"
        )
    if _is_missing_extra(error):
        words = str(error)  # a store names the missing packages itself
        return words if "pip install" in words else "this command needs click and rich: pip install 'fscoord[cli]'"
    if exit_code(error) == BUG:
        return f"a bug in fscoord; please report it with the output of -vv: {type(error).__name__}: {error}"
    if isinstance(error, OSError) and not isinstance(error, errors.FscoordError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _hint(error: click.ClickException) -> str:
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return ""
    hint = f"'{error.ctx.command_path} --help' explains"
    if isinstance(error, click.NoSuchOption):
        hint += "; put -- before a value that begins with a dash"
    return f" ({hint})"


def _is_missing_extra(error: BaseException) -> bool:
    if not isinstance(error, ImportError):
        return False
    name = error.name or ""
    return name.startswith("fscoord[") or name.partition(".")[0] in _EXTRA
