"""The types of arguments, and the options that verbs share: the store, the time limit and the log."""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import click
from click.shell_completion import CompletionItem

from fscoord._arguments import VALUE_MAX, key_text, to_seconds
from fscoord._runtime import system
from fscoord._runtime.escaping import printable, shell_word
from fscoord._waiting.timing import STILL_WAITING
from fscoord.cli import output
from fscoord.cli.exit_codes import HintedError
from fscoord.errors import LimitExceededError, StoreError
from fscoord.rendezvous.events import FOR_PEOPLE
from fscoord.store import Store
from fscoord.stores.url import ENVIRONMENT_VARIABLE, file_path, open_store

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

WRITES_REFUSED: Final = frozenset((system.errno.EACCES, system.errno.EPERM, system.errno.EROFS))
"""The errors of open(2) for writing on a file that this process may only read."""

INPUT_POLL_S = 0.5
"""The longest sleep in one system call while standard input has no data, in seconds."""
CHUNK = 1 << 20

_URL, _ARGUMENT, _TIMEOUT, _LOUDNESS = "fscoord.store", "fscoord.argument", "fscoord.timeout", "fscoord.verbose"
_READ_ONLY = "fscoord.read_only"


class DirectoryPath(click.Path):
    """The type of a directory argument. click does not stat the directory, because stat(2) hangs if the server is gone.

    So click does not detect a missing directory. The verb raises an `OSError` for a missing directory.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return `value` unchanged. Refuse an empty name, which would be the present directory."""
        if not value:
            self.fail("the name is empty", param, ctx)
        return value


def raw(text: str) -> bytes:
    """Return an argument as the bytes that the shell passed."""
    return system.os.fsencode(text)


def recipe_name(text: str) -> bytes:
    """Return the name of a recipe as bytes. Refuse an empty name, as of a shell variable that is not set."""
    if not text:
        raise click.BadParameter("the name is empty; if it is a variable of the shell, it is not set.")
    return raw(text)


def time_limit(text: str) -> float:
    """Parse `text` as a time limit in seconds: 0 tries once, and inf has no limit."""
    return _seconds(text, "; 0 tries once, inf has no limit")


def time_span(text: str) -> float:
    """Parse `text` as a time in seconds that is not a time limit, such as an interval."""
    return _seconds(text, "")


def time_between(text: str) -> float:
    """Parse `text` as the time between two looks, in seconds. Refuse 0, which would look without a pause."""
    seconds = time_span(text)
    if not seconds:
        raise click.BadParameter("0 would leave no pause; the least useful value is about 0.1.")
    return seconds


def _seconds(text: str, advice: str) -> float:
    try:
        return to_seconds(float(text))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number of seconds{advice}.") from None


def _remember(key: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is not None:
            ctx.meta[key] = value

    return callback


def _listen(ctx: click.Context, param: click.Parameter, value: int) -> None:
    ctx.meta[_LOUDNESS] = loudness = ctx.meta.get(_LOUDNESS, 0) + value
    if value:
        logging.getLogger("fscoord").setLevel(logging.INFO if loudness == 1 else logging.DEBUG)


def show_log() -> None:
    """Print the warnings of the library on standard error, and with -v and -vv all that it logs.

    Without -v two kinds of messages are left out, because the verbs print their own: warnings about long waits (see
    `telling_if_slow`), and events of a rendezvous.
    """
    root = logging.getLogger("fscoord")
    if any(isinstance(handler, _ErrorLines) for handler in root.handlers):
        return
    handler = _ErrorLines()
    handler.addFilter(lambda record: root.isEnabledFor(logging.INFO) or not _is_told_otherwise(record))
    handler.setFormatter(_Formatter("fscoord: %(message)s"))  # in the shape of the command's own messages
    root.addHandler(handler)


def _is_told_otherwise(record: logging.LogRecord) -> bool:
    return record.msg == STILL_WAITING or hasattr(record, FOR_PEOPLE)


class _ErrorLines(logging.Handler):
    """A handler that writes to the current `sys.stderr`, which `redirect_stderr` may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        output.write_error(f"{self.format(record)}\n")


class _Formatter(logging.Formatter):
    """Formats the log for people. A rendezvous logs its events as JSON; this formatter shows only their messages."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is that of the base class
        record.message = printable(getattr(record, FOR_PEOPLE, record.message))
        return super().formatMessage(record)


def complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete a path by itself."""
    return [CompletionItem(incomplete, type="file")]


store_option = click.option(
    "--store",
    metavar="URL",
    shell_complete=complete_file,
    expose_value=False,
    callback=_remember(_URL),
    help=f"The store: a path or an address. [default: ${ENVIRONMENT_VARIABLE}]",
)


def store_argument(metavar: str) -> Callable[[F], F]:
    """Return an argument that names the store as `store_option` does."""
    return click.argument(
        "store_argument",
        metavar=f"[{metavar}]",
        required=False,
        shell_complete=complete_file,
        expose_value=False,
        callback=_remember(_ARGUMENT),
    )


def timeout_option(default: str) -> Callable[[F], F]:
    """Return the option --timeout. Its help text names `default`."""
    return seconds_option(
        "--timeout",
        kind=time_limit,
        expose_value=False,
        callback=_remember(_TIMEOUT),
        help=f"How long to wait. 0 tries once; inf has no limit. [default: {default}]",
    )


def seconds_option(*names: str, kind: Callable[[str], float] = time_span, **more: Any) -> Callable[[F], F]:
    """Return an option whose value is a time in seconds. `more` goes to `click.option`. The help shows the default."""
    return click.option(*names, metavar="SECONDS", type=kind, show_default="default" in more, **more)


def number_option(*names: str, least: int = 1, metavar: str = "NUMBER", **more: Any) -> Callable[[F], F]:
    """Return an option for an integer from `least` on. `more` goes to `click.option`. The help shows the default."""
    kind = click.IntRange(min=least)
    return click.option(*names, metavar=metavar, type=kind, show_default="default" in more, **more)


OF_THE_STORE: Final = "300, or the timeout in the address"
WITHOUT_LIMIT: Final = "inf"

verbose = click.option(
    "-v",
    "--verbose",
    count=True,
    expose_value=False,
    callback=_listen,
    help="Log to standard error. -vv logs more, also tracebacks.",
)


def json_option(text: str) -> Callable[[F], F]:
    """Return the option --json with this help text."""
    return click.option("--json", "as_json", is_flag=True, help=text)


as_json = json_option("Print one line of JSON.")


def store_url(ctx: click.Context) -> str:
    """Return the address of the store, from the argument, else from --store, else from the environment variable."""
    argument: str | None = ctx.meta.get(_ARGUMENT)
    if argument is not None:
        return named_url(ctx, argument)
    given: str | None = ctx.meta.get(_URL)
    if given is not None:
        return _not_empty(ctx, "--store", given)
    url = system.os.environ.get(ENVIRONMENT_VARIABLE)
    if not url:
        advice = _flocks_order(ctx) or f"Give --store URL or set {ENVIRONMENT_VARIABLE}"
        raise click.UsageError(f"which store? {advice}", ctx)
    return url


def _flocks_order(ctx: click.Context) -> str:
    """Return advice for ``fscoord lock PATH COMMAND``, which is the order of flock(1); "" for another command line."""
    name, command = ctx.params.get("name"), ctx.params.get("command")
    if ctx.info_name != "lock" or not isinstance(name, bytes) or b"/" not in name:
        return ""
    path, words = shell_word(key_text(name)), [shell_word(word) for word in command or ()]
    mark = ["--"] if words and not words[0].startswith("-") else []
    line = " ".join(["fscoord lock --store", path, "main", *mark, *words])
    return f"{path} is in the place of the lock's NAME. Unlike flock(1), a lock has a name in a store. Type: {line}"


def _not_empty(ctx: click.Context, what: str, url: str) -> str:
    """Return `url`. Refuse an empty `url`: an unset variable of a shell must not lead to another store."""
    if not url:
        raise click.UsageError(f"{what} is empty: name a path or an address", ctx)
    return url


def named_url(ctx: click.Context, argument: str) -> str:
    """Return `argument`, the address of a store. Refuse a --store that differs from `argument`."""
    other = ctx.meta.get(_URL)
    if other not in (None, argument):
        raise click.UsageError(f"which store? The argument names {argument}, and --store names {other}; give one", ctx)
    return _not_empty(ctx, "the argument", argument)


def limit_text(limit: timedelta | float | None) -> str:
    """Return the time limit of a wait in words. None is no limit."""
    seconds = math.inf if limit is None else to_seconds(limit)
    return "without a time limit" if seconds == math.inf else f"up to {seconds:g} s"


def given_timeout(ctx: click.Context) -> float | None:
    """Return the --timeout of the command line in seconds, or None if the option was not given."""
    limit: float | None = ctx.meta.get(_TIMEOUT)
    return limit


def common(function: Callable[P, R], timeout: str = OF_THE_STORE) -> Callable[P, R]:
    """Add the common options, which may stand before or after any verb. `timeout` is the default in the help.

    If an option is given twice, the option after the verb counts.
    """
    return store_option(timeout_option(timeout)(verbose(function)))


HAS_READ_ONLY: Final = "`{} --read-only` needs no permission to write"
RECORDS_DEATHS: Final = "`{}` records the deaths that it finds, so it writes; members, holders, ps and dump only read"


def _open_to_look(ctx: click.Context, advice: str) -> Store:
    """Open the store for writing. If this process may only read it, raise an error that ends with `advice`."""
    try:
        return _open(ctx, looks_only=False)
    except StoreError as error:
        is_refused = getattr(error, "errno", None) in WRITES_REFUSED
        if not is_refused or error.path is None or not system.os.access(error.path, system.os.R_OK):
            raise
        raise HintedError(error, advice.format(ctx.command_path)) from error


def _open(ctx: click.Context, *, looks_only: bool) -> Store:
    url = store_url(ctx)
    options: dict[str, Any] = {}
    if _TIMEOUT in ctx.meta:
        options["timeout"] = ctx.meta[_TIMEOUT]
    if file_path(url) is not None:
        options["world_size"] = None  # the address may be that of a job, but a command is not one of its participants
        if looks_only:
            options["read_only"] = True
    return open_store(url, **options)


def _with_store(
    opening: Callable[[click.Context], Store], timeout: str = OF_THE_STORE
) -> Callable[[Callable[Concatenate[Store, P], R]], Callable[P, R]]:
    """Return a decorator that adds the common options, opens the store by `opening`, and passes it to the verb."""

    def decorate(function: Callable[Concatenate[Store, P], R]) -> Callable[P, R]:
        """Return a function that opens the store and passes it to `function`."""

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with opening(click.get_current_context()) as store:
                return function(store, *args, **kwargs)

        return common(call, timeout)

    return decorate


def _open_existing(ctx: click.Context) -> Store:
    _open(ctx, looks_only=True).close()
    return _open_to_look(ctx, RECORDS_DEATHS)


def _open_to_get(ctx: click.Context) -> Store:
    return _open(ctx, looks_only=True) if ctx.meta[_READ_ONLY] else _open_to_look(ctx, HAS_READ_ONLY)


with_store: Final = _with_store(partial(_open, looks_only=False))
with_store_to_work: Final = _with_store(partial(_open, looks_only=False), WITHOUT_LIMIT)
"""Opens a store as `with_store` does, for a verb that waits without limit unless --timeout is given."""
with_existing_store: Final = _with_store(_open_existing)
"""Opens a store for writing, but creates no file store, because the path may be mistyped. For verbs that read a store
and write only the deaths that they find."""
with_store_that_appears: Final = _with_store(partial(_open_to_look, advice=RECORDS_DEATHS))
"""Opens a store for writing, and creates a missing store. For a verb that waits for data and writes only the deaths
that it finds."""
with_store_to_read: Final = _with_store(partial(_open, looks_only=True))
"""Opens a file store for reading only, so a mistyped path creates no store."""
with_store_to_watch: Final = _with_store(partial(_open, looks_only=True), WITHOUT_LIMIT)
"""Opens a store as `with_store_to_read` does, for a verb that waits without limit unless --timeout is given."""


def with_store_to_get(function: Callable[Concatenate[Store, P], R]) -> Callable[P, R]:
    """Open the store as `with_store` does, or with the option --read-only as `with_store_to_read` does.

    A verb that waits for a value opens the store for writing: it creates a missing store, and registers its wait so
    that writers wake it. If the file can't be opened for writing, the verb fails and does not open it for reading. For
    example, the file may belong to another user. A script must read the file of another user only if --read-only is
    given.
    """
    read_only = click.option(
        "--read-only",
        is_flag=True,
        expose_value=False,
        callback=_remember(_READ_ONLY),
        help="Open a file store for reading: needs no permission to write, and makes no store that is missing.",
    )
    return read_only(_with_store(_open_to_get)(function))


def content(value: bytes) -> bytes:
    """Return `value`, or the contents of standard input if `value` is ``-``."""
    if value != b"-":
        return value
    if sys.stdin is None:
        raise click.UsageError("'-' means standard input, and standard input is closed: give the value itself")
    words = "reading the value from standard input"
    if sys.stdin.isatty():
        output.tell(log, f"{words}; Ctrl-D at the beginning of a line ends it")
    else:
        log.info("%s", words)
    found = _read_input(VALUE_MAX + 1)
    if len(found) > VALUE_MAX:
        raise LimitExceededError(f"the value on standard input is over the limit of {VALUE_MAX} bytes")
    return found


def _read_input(size: int) -> bytes:
    """Read standard input to its end, but at most `size` bytes.

    A signal that arrives just before read(2) begins does not interrupt the call, because Python checks for signals only
    before and after it. So the process sleeps in poll(2) instead, for `INPUT_POLL_S` seconds at a time.
    """
    try:
        descriptor = sys.stdin.fileno()
    except OSError:  # io.UnsupportedOperation: standard input is an object without a descriptor
        return sys.stdin.buffer.read(size)
    is_ready = system.readiness(descriptor)
    parts: list[bytes] = []
    while size > 0:
        if is_ready(INPUT_POLL_S * 1000):
            part = system.os.read(descriptor, min(size, CHUNK))
            if not part:
                break
            parts.append(part)
            size -= len(part)
    return b"".join(parts)
