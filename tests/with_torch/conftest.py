"""Tests against the real torch, which brings gigabytes: `tox -e torch` has it, the other environments do not."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]
