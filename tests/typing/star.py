"""Code that imports the public names by a star, checked by `mypy --strict` and never run."""

from typing_extensions import assert_type

from fscoord import *  # noqa: F403 - the star import is under test


def missing_ranks(path: str) -> tuple[str, ...]:
    with FileStore(path, world_size=2) as store:  # noqa: F405
        try:
            assert_type(store.get("k"), bytes)
        except StoreTimeoutError as error:  # noqa: F405
            assert_type(error.waited, float)
            return error.missing_ranks
        except RendezvousError as error:  # noqa: F405
            return error.no_such_attribute  # type: ignore[attr-defined, no-any-return]
    return ()
