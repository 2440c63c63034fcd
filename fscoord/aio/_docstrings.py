"""`explained_by` gives a coroutine, or a class of coroutines, the docstring of its blocking counterpart."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def explained_by(source: object) -> Callable[[T], T]:
    """Decorate a function or a class: it gets the docstring of `source`.

    The docstring of the function, if it has one, replaces the first paragraph. The docstring of a class replaces the
    whole description, because the description of a blocking class is about threads.
    """

    def decorate(thing: T) -> T:
        described: Any = thing
        own = vars(described).get("__doc__") or described.__doc__
        first, _, others = (inspect.getdoc(source) or "").partition("\n\n")
        if inspect.isclass(source):
            sections = re.findall(r"^\w+:\n(?: .*\n?)+", others, re.MULTILINE)
            others = "\n\n".join(map(str.rstrip, sections)).replace("``with", "``async with")
        described.__doc__ = "\n\n".join(part for part in (inspect.cleandoc(own or first), others) if part)
        return thing

    return decorate
