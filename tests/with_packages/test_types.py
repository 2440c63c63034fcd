"""The integrations and the types of the packages that they plug into, as mypy sees them: `tox -e types` has none."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.packages

REPOSITORY = Path(__file__).parents[2]
PACKAGES = {
    "dask": "distributed",
    "jax": "jax",
    "optuna": "optuna",
    "tooz": "tooz",
    "torch": "torch",
    "torchrun": "torch",
}


@pytest.mark.timeout(1200)  # mypy reads the packages without a cache, which takes a minute on a quiet machine
def test_types_of_the_integrations_fit_those_of_their_packages(tmp_path: Path) -> None:
    version = f"--python-version={sys.version_info.major}.{sys.version_info.minor}"
    options = ["--no-error-summary", f"--cache-dir={tmp_path}", version]
    files = [f"fscoord/integrations/{module}.py" for module, package in PACKAGES.items() if find_spec(package)]
    assert files, "the tests with packages run where they are installed"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *files],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.stdout == ""
    assert done.returncode == 0
