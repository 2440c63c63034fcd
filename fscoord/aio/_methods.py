"""Base classes and decorators that make the asyncio version of a blocking class or function."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from types import FunctionType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from fscoord._arguments import refuse_copies
from fscoord.aio._docstrings import explained_by
from fscoord.aio._driver import StoreDriver, all_steps, bound
from fscoord.aio.store import AsyncStore, driver_of
from fscoord.store import Store

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ForTasks:
    """The base class of asyncio versions of blocking classes. Each method calls the same method of the object `core`.

    Args:
        driver: runs the calls and waits of `core` for the tasks.
        core: the blocking object.
    """

    __reduce__ = refuse_copies

    def __init_subclass__(cls, **given: Any) -> None:
        """Add the arguments and errors of the blocking class to the docstring, if `made_of` made the constructor."""
        super().__init_subclass__(**given)
        core_type = getattr(vars(cls).get("__init__"), "core_type", None)
        if core_type is not None:
            explained_by(core_type)(cls)

    def __init__(self, driver: StoreDriver, core: Any) -> None:
        self._driver = driver
        self._core = core

    def __repr__(self) -> str:
        return f"<aio.{type(self).__name__} {repr(self._core).partition(' ')[2]}"


class Named(ForTasks):
    """The base class for objects that have a name in the store."""

    @property
    def name(self) -> str:
        """The name of this object in the store."""
        return str(self._core.name)


def itself(for_tasks: S, _: object) -> S:
    """Return `for_tasks`. Use this function as `wrap` if the blocking method returns ``self``."""
    return for_tasks


def made_of(
    kind: Callable[Concatenate[Store, P], object],
) -> Callable[[Callable[[Any], None]], Callable[Concatenate[Any, AsyncStore, P], None]]:
    """Decorate the ``__init__`` of a subclass of `ForTasks` that is the asyncio version of the blocking class `kind`.

    The decorated ``__init__`` takes an `AsyncStore` and the further arguments of `kind`. The decorated ``__init__``
    makes an object of `kind` with these arguments, and then calls the undecorated ``__init__``.
    """

    def decorate(do: Callable[[Any], None]) -> Any:
        @wraps(kind.__init__, updated=())
        def make(self: Any, store: AsyncStore, *arguments: Any, **named: Any) -> None:
            driver = driver_of(store)
            ForTasks.__init__(self, driver, kind(driver.store, *arguments, **named))
            do(self)

        made = _with_async_store(make)
        made.core_type = kind
        return made

    return decorate


class FunctionForTasks(Protocol[P, T_co]):
    """The type of a coroutine function whose first argument is an `AsyncStore`."""

    def __call__(self, store: AsyncStore, *arguments: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T_co]: ...


def function_for_tasks(
    function: Callable[Concatenate[Store, P], T], steps: Callable[..., Any] | None = None
) -> FunctionForTasks[P, T]:
    """Make a coroutine function from the blocking `function`. The coroutine calls `function` in a thread.

    If `function` waits, pass `steps`: a function with the same arguments that returns the waits as a generator. The
    coroutine then calls `steps` instead of `function`, and waits in the event loop.
    """

    @wraps(function)
    async def call(store: AsyncStore, *arguments: Any, **named: Any) -> Any:
        driver = driver_of(store)
        return await driver.drive(all_steps(bound(steps or function, arguments, named, driver.store)))

    return cast("FunctionForTasks[P, T]", _with_async_store(call))


def _with_async_store(made: Any) -> Any:
    """Give `made` the signature of the function that it wraps, with `AsyncStore` as the type of `store`."""
    of = made.__wrapped__
    shown = made.__wrapped__ = FunctionType(of.__code__, of.__globals__, None, of.__defaults__, of.__closure__)
    shown.__kwdefaults__ = of.__kwdefaults__
    shown.__annotations__ = made.__annotations__ = {**of.__annotations__, "store": AsyncStore}
    return made
