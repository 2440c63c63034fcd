"""Tests that run mypy: `tox -e types` and `tox -e torch` have it, the other environments do not."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("mypy") else ["test_*.py"]
