"""Import every module of fscoord; print each that can't be imported, and why."""

from __future__ import annotations

import importlib
import pkgutil

import fscoord

EXTRAS = {"click", "dask", "distributed", "jax", "lightning", "optuna", "pytest", "rich", "tooz", "torch", "urllib3"}

names = [each.name for each in pkgutil.walk_packages(fscoord.__path__, "fscoord.") if each.name != "fscoord.__main__"]
missing = 0
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").startswith("fscoord[") or error.name in EXTRAS:
            missing += 1
        else:
            print(name, repr(error))
    except Exception as error:
        print(name, repr(error))
print(len(names), "modules,", missing, "without their extra")
