"""The error tree: what each is besides, and that it crosses process boundaries whole."""

from __future__ import annotations

import errno
import pickle

import pytest

import fscoord
from fscoord import errors

EXAMPLES = [
    errors.FscoordError("text"),
    errors.StoreTimeoutError("text", keys=["a"], missing_ranks=["1"], holder="host:1", waited=0.5),
    errors.StoreError("text", path="/p", maybe_applied=True),
    errors.StoreClosedError("text", path="/p"),
    errors.StoreGoneError("text", path="/p"),
    errors.StaleRunError("text", path="/p"),
    errors.StoreUnavailableError("text", path="/p", maybe_applied=True, errno=errno.ENOSPC),
    errors.CorruptLogError("text", path="/p", offset=7, reason="why"),
    errors.QueueEmptyError("text", path="/p"),
    errors.LimitExceededError("text", path="/p"),
    errors.InsecurePathError("text", path="/p"),
    errors.UnsupportedFilesystemError("text", path="/p"),
    errors.BarrierError("text"),
    errors.NoProcessGroupError("text"),
    errors.BrokenBarrierError("text", missing=["1", "2"], dead=["2"]),
    errors.HoldLostError("text"),
    errors.StaleTokenError("text"),
    errors.WorkFailedError("text"),
    errors.RendezvousClosedError("text"),
    errors.RendezvousConnectionError("text"),
    errors.RendezvousError("text"),
    errors.RendezvousGracefulExit("text"),
    errors.RendezvousStateError("text"),
    errors.RendezvousTimeoutError("text"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_with_everything_it_says(error: fscoord.FscoordError) -> None:
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == str(error) == "text"
    assert vars(twin) == vars(error)
    assert getattr(twin, "errno", None) == getattr(error, "errno", None)


def test_every_error_of_the_tree_is_an_example() -> None:
    assert {type(error) for error in EXAMPLES} == {getattr(errors, name) for name in errors.__all__}


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (errors.FscoordError, [RuntimeError]),
        (errors.StoreTimeoutError, [TimeoutError, LookupError]),
        (errors.StoreUnavailableError, [OSError]),
        (errors.LimitExceededError, [ValueError]),
        (errors.NoProcessGroupError, [AssertionError]),
        (errors.InsecurePathError, [PermissionError]),
        (errors.UnsupportedFilesystemError, [OSError]),
        (errors.BrokenBarrierError, [errors.BarrierError]),
        (errors.RendezvousTimeoutError, [errors.RendezvousError, TimeoutError]),
        (errors.RendezvousConnectionError, [errors.RendezvousError]),
    ],
)
def test_an_error_is_also_what_its_catcher_would_expect(
    kind: type[BaseException], others: list[type[BaseException]]
) -> None:
    for other in [*others, RuntimeError, errors.FscoordError]:
        assert issubclass(kind, other)


def test_an_error_number_is_where_oserror_has_it() -> None:
    try:
        raise errors.StoreUnavailableError("no space", errno=errno.ENOSPC)
    except OSError as error:
        assert error.errno == errno.ENOSPC
        assert str(error) == "no space"
