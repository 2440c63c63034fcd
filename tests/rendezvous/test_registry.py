"""Handlers by the name of their backend, the outcome of a round, and the address of rank 0."""

from __future__ import annotations

import importlib.metadata
import logging

import pytest
from support.places import start_thread

from fscoord import HashStore, StoreTimeoutError
from fscoord.rendezvous import (
    RendezvousHandler,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)


class Handler(RendezvousHandler):
    def __init__(self, params):
        self.params = params

    def get_backend(self):
        return "mine"

    def next_rendezvous(self):
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("host", 1))

    def is_closed(self):
        return False

    def set_closed(self):
        pass

    def num_nodes_waiting(self):
        return 0

    def get_run_id(self):
        return self.params.run_id

    def shutdown(self):
        return True


def parameters(backend="mine"):
    return RendezvousParameters(backend, "", "id", 1, 1)


@pytest.fixture
def registry():
    return RendezvousHandlerRegistry()


def test_registered_maker_makes_the_handler(registry):
    registry.register("mine", Handler)
    params = parameters()
    handler = registry.create_handler(params)
    assert handler.params is params
    assert handler.use_agent_store is False


def test_backend_that_is_unknown_is_refused_with_the_names_of_all(registry):
    registry.register("mine", Handler)
    with pytest.raises(ValueError, match="'other'; known are: mine"):
        registry.create_handler(parameters("other"))


def test_backend_name_has_one_maker(registry):
    class Makers:
        def make(self, params):
            return Handler(params)

        def make_otherwise(self, params):
            return Handler(params)

    registry.register("mine", Handler)
    registry.register("mine", Handler)
    makers = Makers()
    registry.register("method", makers.make)
    registry.register("method", makers.make)
    for another in (makers.make_otherwise, Makers().make):
        with pytest.raises(ValueError, match="registered already"):
            registry.register("method", another)
    with pytest.raises(ValueError, match="already"):
        registry.register("mine", lambda params: Handler(params))
    with pytest.raises(ValueError):
        registry.register("", Handler)


def test_maker_that_makes_something_else_is_an_error(registry):
    registry.register("other", Handler)
    with pytest.raises(RuntimeError, match="'mine'"):
        registry.create_handler(parameters("other"))


class Entry:
    def __init__(self, name, maker):
        self.name = name
        self.maker = maker

    def load(self):
        if isinstance(self.maker, Exception):
            raise self.maker
        return self.maker


def test_makers_of_other_packages_are_found_and_broken_ones_break_nothing(registry, monkeypatch, caplog):
    found = [Entry("broken", ImportError("no such thing")), Entry("mine", Handler), Entry("taken", Handler)]
    groups = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: groups.append(group) or found)
    registry.register("taken", lambda params: None)
    registry.load_entry_points()
    assert groups == ["fscoord.rendezvous"]
    assert isinstance(registry.create_handler(parameters()), Handler)
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "broken" in warning
    assert "no such thing" in warning


def test_rank_0_publishes_an_address_and_the_others_get_it():
    store = HashStore()
    with start_thread(RendezvousStoreInfo.build, 1, store) as other:
        first = RendezvousStoreInfo.build(0, store, "10.0.0.1", 77)
    assert first == other.result == RendezvousStoreInfo("10.0.0.1", 77)
    assert RendezvousStoreInfo.build(0, store).master_port > 0


def test_address_does_not_exist_without_rank_0():
    with pytest.raises(StoreTimeoutError, match="MASTER_ADDR"):
        RendezvousStoreInfo.build(1, HashStore(), timeout=0)
