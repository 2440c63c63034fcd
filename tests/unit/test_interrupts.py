"""`raise_unless_absent` recognises the error of a list or a deque on every Python, and no other."""

import ctypes
import signal
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from types import FunctionType

import pytest

from fscoord._runtime.interrupts import raise_unless_absent


def _catch(step: Callable[[], object]) -> str:
    try:
        step()
    except (IndexError, ValueError) as error:
        raise_unless_absent(error)
        return "absent"
    return "present"


# The same function, as if it stood in a module of the package.
catch = FunctionType(_catch.__code__, {**globals(), "__name__": "fscoord.recipes"})


@pytest.mark.parametrize("kind", [list, deque])
def test_missing_item_of_a_list_or_a_deque_is_absent(kind: type[list[int] | deque[int]]) -> None:
    assert catch(kind().pop) == "absent"
    assert catch(partial(kind().remove, 1)) == "absent"
    assert catch(partial(kind([1]).remove, 1)) == "present"


@pytest.mark.parametrize("error", [ValueError("of the program"), IndexError("pop from empty list")])
def test_error_of_a_signal_handler_is_raised_where_an_item_may_be_absent(error: Exception) -> None:
    def handler(number: int, frame: object) -> None:
        raise error

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(type(error)) as caught:
            catch(partial(signal.raise_signal, signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught.value is error


def test_error_that_c_code_raises_in_a_thread_is_raised_where_an_item_may_be_absent() -> None:
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc
    with pytest.raises(ValueError, match=r"^$"):
        catch(partial(throw, ctypes.c_ulong(threading.get_ident()), ctypes.py_object(ValueError)))
