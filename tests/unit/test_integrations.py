"""An integration whose package is missing says which extra to install. Here the packages are missing on purpose."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORT = """
import sys
sys.modules[{package!r}] = None
try:
    import fscoord.integrations.{package}
except ImportError as error:
    print(error.name, error, sep=": ")
"""


@pytest.mark.parametrize("package", ["jax", "lightning"])
def test_integration_without_its_package_names_the_extra(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT.format(package=package)], capture_output=True, text=True, timeout=60, check=True
    )
    name = f"fscoord[{package}]"
    expected = f"{name}: fscoord.integrations.{package} needs {package}: install the extra, pip install '{name}'\n"
    assert done.stdout == expected
