"""The machine of a measurement: the facts without which a figure means nothing."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path

import fscoord


def facts(directory: str) -> dict[str, str | int | float]:
    """Return the facts about this machine: processor, kernel, Python, versions, file system, and load."""
    found: dict[str, str | int | float] = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "system": f"{platform.system()} {platform.release()}",
        "virtual": _line("/sys/class/dmi/id/product_name") or "unknown",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "fscoord": fscoord.__version__,
        "torch": _version("torch"),
        "watchdog": _version("watchdog"),
        "file_system": _file_system(directory),
        "load_1_min": load(),
    }
    if sys.flags.optimize or sys.flags.dev_mode:
        found["flags"] = str(sys.flags)
    return found


def load() -> float:
    """Return the load: the average number of runnable processes in the last minute."""
    return round(os.getloadavg()[0], 2)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _file_system(directory: str) -> str:
    """Return the type of the file system that `directory` is on, by the longest mount point above it."""
    where = os.path.realpath(directory)
    best, kind = "", "unknown"
    for line in _line("/proc/self/mounts").splitlines():
        _, point, name = line.split()[:3]
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, name
    return kind
