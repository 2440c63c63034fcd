"""Build and check a release: ``tox -e release``.

It builds the archive and the wheel twice, in two copies of the checkout, with two time zones and umasks, and compares
them bit by bit. It checks both with twine and check-wheel-contents, and installs the wheel in an empty environment on
each Python and runs ``fscoord demo`` there. It writes the list of what the wheel brings with it (an SBOM in the format
of CycloneDX), the checksums, the Spack recipe with the checksum of the archive, and the release notes. Nothing is
uploaded.

    release.py [--output DIR] [--python VERSION]... [--allow-changes]     all of that
    release.py on-the-index URL     makes the install lines and the links true for the index; URL is the repository

Exit codes: 0 all is well; 1 a step failed, and each that did is named; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
RECIPE = Path("packaging/spack/spack_repo/fscoord/packages/py_fscoord/package.py")
STEP_S = 900
"""How many seconds one program may take."""
LEFT_OUT = shutil.ignore_patterns(
    ".git",
    ".tox",
    ".venv",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
    ".mutants",
    "dist",
    "build",
    "_build",
    ".coverage*",
)


class Failed(Exception):
    """A step found something wrong, which the text names."""


def run(*words: str | Path, at: Path = REPOSITORY, umask: int = -1, **variables: str) -> str:
    """Run a program and return its standard output; raise `Failed` with all that it said unless it exits with 0."""
    hidden = {"PYTHONPATH", "VIRTUAL_ENV", "FSCOORD_STORE", "FSCOORD_TRACE"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        list(map(str, words)),
        cwd=at,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=STEP_S,
        umask=umask,
        check=False,
    )
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, words))} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


# What is released


def version(repository: Path = REPOSITORY) -> str:
    """Return the version of the package, whose entry in the changelog must be dated."""
    text = (repository / "fscoord" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise Failed("fscoord/__init__.py has no __version__")
    release_date(repository, found[1])
    return found[1]


def entry(repository: Path, number: str) -> tuple[str, str]:
    """Return the date of version `number` in the changelog, and the text of its entry."""
    text = (repository / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(number)} \(([^)\n]+)\)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise Failed(f"CHANGELOG.md has no entry for {number}")
    return found[1], found[2].strip()


def release_date(repository: Path, number: str) -> datetime:
    """Return the date of the entry of version `number`."""
    said = entry(repository, number)[0]
    try:
        return datetime.strptime(said, "%Y-%m-%d").replace(tzinfo=timezone.utc)
    except ValueError:
        raise Failed(f"CHANGELOG.md: the entry for {number} is not dated, but says {said!r}") from None


def notes(repository: Path, number: str) -> str:
    """Return the release notes: what the page of that name says, and the entry of the changelog."""
    written = repository / "packaging" / "notes" / f"{number}.md"
    if not written.exists():
        raise Failed(f"{written.relative_to(repository)} is missing: what a user should know of this release")
    return f"{written.read_text(encoding='utf-8').rstrip()}\n\n## All changes\n\n{entry(repository, number)[1]}\n"


# The steps


def make_empty(output: Path) -> None:
    """Make the directory `output`, or remove the files of an earlier release from it, and nothing else."""
    output.mkdir(parents=True, exist_ok=True)
    for pattern in ("fscoord-*.tar.gz", "fscoord-*.whl", "fscoord-*.cdx.json", "NOTES.md", "package.py", "SHA256SUMS"):
        for path in output.glob(pattern):
            path.unlink()
    others = sorted(path.name for path in output.iterdir())
    if others:
        raise Failed(f"{output} holds what is no part of a release: {', '.join(others[:5])}; choose another --output")


def look_for_changes() -> None:
    """Fail if the checkout has files that no commit has, which would get into the archive."""
    if (REPOSITORY / ".git").exists():
        changed = run("git", "status", "--porcelain").strip()
        if changed:
            raise Failed(f"the checkout has changes: commit them, or pass --allow-changes\n{changed}")


def build(directory: Path, epoch: int, umask: int = 0o022, zone: str = "UTC") -> list[Path]:
    """Build the archive, and the wheel from the archive, in a fresh copy of the checkout; return both."""
    with tempfile.TemporaryDirectory() as copy:
        place = Path(copy) / "checkout"
        shutil.copytree(REPOSITORY, place, ignore=LEFT_OUT, symlinks=True)
        run(
            sys.executable,
            "-m",
            "build",
            "--outdir",
            directory,
            at=place,
            umask=umask,
            SOURCE_DATE_EPOCH=str(epoch),
            TZ=zone,
        )
    return sorted(directory.iterdir())


def compare(first: list[Path], second: list[Path]) -> None:
    """Fail unless both builds gave the same files, bit by bit."""
    if [path.name for path in first] != [path.name for path in second]:
        raise Failed(f"two builds gave {[path.name for path in first]} and {[path.name for path in second]}")
    for one, other in zip(first, second, strict=True):
        if not filecmp.cmp(one, other, shallow=False):
            raise Failed(f"two builds of {one.name} differ")


def check(archives: list[Path]) -> None:
    """Check names, metadata, the README on the index, and that the wheel holds what it should and no more."""
    run(sys.executable, "-m", "twine", "check", "--strict", *archives)
    wheel = next(path for path in archives if path.suffix == ".whl")
    run(Path(sys.executable).with_name("check-wheel-contents"), "--toplevel", "fscoord,pytest_fscoord", wheel)


def find_python(wanted: str) -> str:
    """Return the path of Python `wanted`: the one on PATH, or pyenv's newest of this version."""
    if sys.version_info[:2] == tuple(map(int, wanted.split("."))):
        return sys.executable
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    named = shutil.which(f"python{wanted}")
    candidates = sorted(root.glob(f"versions/{wanted}.*/bin/python{wanted}"), key=lambda path: path.parts[-3])
    for candidate in ([Path(named)] if named else []) + candidates[::-1]:
        said = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False)
        if said.returncode == 0 and said.stdout.startswith(f"Python {wanted}."):
            return str(candidate)
    raise Failed(f"there is no python{wanted} on PATH, and pyenv has none")


def install(wheel: Path, python: str) -> Path:
    """Install the wheel with the extra `cli` in an empty environment, run the demonstration, and return its Python.

    The caller removes the environment.
    """
    place = Path(tempfile.mkdtemp(prefix="fscoord-release-"))
    try:
        run(find_python(python), "-m", "venv", place / "venv")
        inside = place / "venv" / "bin"
        run(inside / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", f"{wheel}[cli]", at=place)
        run(inside / "python", "-m", "pip", "check", "--disable-pip-version-check", at=place)
        found = run(inside / "fscoord", "--version", at=place).split()[-1]
        if found != wheel.name.split("-")[1]:
            raise Failed(f"the command says that it is version {found}")
        run(inside / "fscoord", "demo", at=place, TMPDIR=str(place))
        for path in ("share/man/man1/fscoord.1", "share/bash-completion/completions/fscoord"):
            if not (place / "venv" / path).exists():
                raise Failed(f"the wheel installs no {path}")
    except BaseException:
        shutil.rmtree(place)
        raise
    return inside / "python"


def write_sbom(python: Path, number: str, path: Path) -> None:
    """Write what is installed beside `python`, but for pip, as an SBOM of CycloneDX."""
    run(python, "-m", "pip", "uninstall", "-q", "-y", "pip")
    words = ["--mc-type", "library", "--output-reproducible", "-o", str(path)]
    run(sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject", "pyproject.toml", *words, str(python))
    found = json.loads(path.read_text(encoding="utf-8"))
    found["metadata"]["component"]["version"] = number  # which pyproject.toml leaves to the build
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    names = {part["name"] for part in found["components"]}
    missing = {"portalocker", "watchdog", "click", "rich"} - names
    if missing:
        raise Failed(f"the SBOM lacks {sorted(missing)}")


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def with_checksum(recipe: str, number: str, found: str) -> str:
    """Return the Spack recipe with the checksum of the archive of version `number`."""
    line = f'    version("{number}")\n'
    if line not in recipe:
        raise Failed(f"the Spack recipe has no line {line.strip()}")
    recipe = re.sub(r"^    # The archive does not know .*\n", "", recipe, flags=re.MULTILINE)
    return recipe.replace(line, f'    version("{number}", sha256="{found}")\n')


# The install lines

TRUE_NOW = (
    ("docs/conf.py", "ON_THE_INDEX = False\n", "ON_THE_INDEX = True\n"),
    (
        "README.md",
        "Run `pip install '.[cli]'` in a checkout, or `pip install './fscoord-{version}-py3-none-any.whl[cli]'` with a wheel.\n",  # noqa: E501
        "Run `pip install 'fscoord[cli]'`.\n",
    ),
)
"""What changes when the package is on the index: a file, what it says before, and after. The docs' pages follow the
switch in docs/conf.py when they are built."""


URLS = """
[project.urls]
Homepage = "{url}"
Documentation = "{url}/blob/main/docs/index.md"
Changelog = "{url}/blob/main/CHANGELOG.md"
Issues = "{url}/issues"
"""
"""The table of `pyproject.toml` with the address of the repository, and what it stands after."""
BEFORE_URLS = 'dynamic = ["version"]\n'

LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!\w+:|#)([^)\s]+)\)")
"""A link or a picture in the README with a path in the repository. An index shows the README without the repository."""


def with_addresses(readme: str, url: str) -> str:
    """Return the README with the address of each file in the repository at `url`."""
    readme = re.sub(r'(src(?:set)?=")(?!\w+:)', rf"\g<1>{url}/raw/main/", readme)
    return LINK.sub(lambda m: f"{m[1]}{m[2]}({url}/{'raw' if m[1] else 'blob'}/main/{m[3]})", readme)


def put_on_the_index(repository: Path, number: str, url: str) -> None:
    """Change each install line, and write the addresses in the repository at `url`; or change nothing."""
    if not re.fullmatch(r"https://[^/]+(/[^/]+)+", url):
        raise Failed(f"{url!r} is not the https address of a repository, without a slash at its end")
    texts = {}
    for name, before, after in TRUE_NOW:
        text, line = (repository / name).read_text(encoding="utf-8"), before.format(version=number)
        if text.count(line) != 1:
            raise Failed(f"{name} does not say once: {line.strip()}")
        texts[name] = text.replace(line, after)
    texts["README.md"] = with_addresses(texts["README.md"], url)
    project = (repository / "pyproject.toml").read_text(encoding="utf-8")
    if project.count(BEFORE_URLS) != 1 or "[project.urls]" in project:
        raise Failed("pyproject.toml has no place for [project.urls], or has it already")
    texts["pyproject.toml"] = project.replace(BEFORE_URLS, BEFORE_URLS + URLS.format(url=url))
    for name, text in texts.items():
        (repository / name).write_text(text, encoding="utf-8")


# All of it


class Steps:
    """Runs one step after the other, prints the time of each, and collects what failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def run(self, name: str, call: Callable[[], object]) -> object:
        """Call and return the result, or None if the step failed."""
        start = time.monotonic()
        try:
            result, word = call(), "passed"
        except (Failed, OSError, subprocess.TimeoutExpired) as error:
            print(error, flush=True)
            self.failed.append(name)
            result, word = None, "FAILED"
        print(f"{name:<44} {time.monotonic() - start:6.1f} s  {word}", flush=True)
        return result


def release(output: Path, pythons: list[str], *, allow_changes: bool) -> int:
    steps, number = Steps(), version()
    epoch = int(release_date(REPOSITORY, number).timestamp())
    make_empty(output)
    if not allow_changes:
        steps.run("look for changes", look_for_changes)
    with tempfile.TemporaryDirectory() as again:
        steps.run("build the archive and the wheel", lambda: build(output, epoch))
        archives = sorted(output.iterdir())
        if len(archives) != 2:
            return 1
        steps.run(
            "build both again, bit by bit the same",
            lambda: compare(archives, build(Path(again), epoch, 0o077, "Asia/Kathmandu")),
        )
    steps.run("check metadata and contents", lambda: check(archives))
    source, wheel = sorted(archives, key=lambda path: path.suffix == ".whl")
    for python in pythons:
        inside = steps.run(f"install and run it on Python {python}", partial(install, wheel, python))
        if isinstance(inside, Path):
            if python == pythons[-1]:
                steps.run("write the SBOM", partial(write_sbom, inside, number, output / f"fscoord-{number}.cdx.json"))
            shutil.rmtree(inside.parents[2])

    def write() -> None:
        (output / "NOTES.md").write_text(notes(REPOSITORY, number), encoding="utf-8")
        recipe = with_checksum((REPOSITORY / RECIPE).read_text(encoding="utf-8"), number, checksum(source))
        (output / "package.py").write_text(recipe, encoding="utf-8")
        lines = [f"{checksum(path)}  {path.name}\n" for path in sorted(output.iterdir())]
        (output / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")

    steps.run("write notes, Spack recipe and checksums", write)
    print(*(f"  {path.relative_to(output.parent)}" for path in sorted(output.iterdir())), sep="\n")
    print(f"fscoord {number}: " + (f"FAILED: {', '.join(steps.failed)}" if steps.failed else "ready"))
    return 1 if steps.failed else 0


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", nargs="?", choices=["build", "on-the-index"], default="build")
    parser.add_argument("url", nargs="?", default="", help="with on-the-index: the address of the repository")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "dist", help="where the files go")
    parser.add_argument("--python", action="append", help="a version to install the wheel on; by default each")
    parser.add_argument("--allow-changes", action="store_true", help="build a checkout with uncommitted changes, too")
    given = parser.parse_args(words)
    try:
        if given.action == "on-the-index":
            put_on_the_index(REPOSITORY, version(), given.url)
            return 0
        return release(given.output.resolve(), given.python or list(PYTHONS), allow_changes=given.allow_changes)
    except Failed as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
