"""Every code block of the README and of docs/ does what the page says.

A page's blocks run in their order, in one directory of the page's own:

- ``python`` whose first line is ``# name.py`` is saved under that name, for the blocks that follow;
- other ``python`` blocks are executed, and ``pycon`` sessions are compared, in one namespace for the page;
- of ``console`` blocks each line after ``$ `` runs in bash, and what it prints is compared with the lines under it;
- a line that ends in ``&`` or ``& done`` goes on in the background until the line ``kill %1`` or the end of the page,
  and what it prints is in the file ``background-output``;
- after the line ``<!-- test: alike -->`` numbers and blanks may differ, but not exit codes, the present directory is
  ``/shared``, and this host is ``node1``; after ``<!-- test: until alike -->`` each command is also repeated until its
  output is alike;
- a block inside of ``<!--`` and ``-->`` runs, and readers do not see it;
- in what is compared ``...`` stands for any text, and blanks at the end of lines do not count;
- a ``python`` or ``pycon`` block of a how-to page that is not saved under a name also runs alone;
- ``sh``, ``text``, ``ini`` and the like are shown, not run (but those of the README: a test below says why).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pages
import pytest
from pages import FENCE, RUN, blocks
from support.recipes import RESULTS

from fscoord import recipes

pytestmark = [pytest.mark.once, pytest.mark.timeout(600)]  # a page starts up to 40 processes

REPOSITORY = Path(__file__).parent.parent
NAMES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
PAGES = [*(REPOSITORY / name for name in NAMES), *sorted((REPOSITORY / "docs").rglob("*.md"))]
SHOWN = {
    "",
    "bash",
    "ini",
    "json",
    "sh",
    "text",
    "toml",
    "yaml",
    "{eval-rst}",
    "{glossary}",
    "{graphviz}",
    "{image}",
    "{include}",
    "{toctree}",
}
LAUNCHERS = ("RANK", "WORLD_SIZE", "OMPI_", "MV2_", "MVP_", "PMI", "JSM_", "PALS_", "FLUX_", "SLURM_", "JOB_", "PET_")
SET_BY_OTHERS = ("FSCOORD_", "COLUMNS", *LAUNCHERS, "PYTEST_", "PYTHONUNBUFFERED")  # the last one divides lines
RUNNABLE = [page for page in PAGES if any(block.language in RUN for block in blocks(page))]
HOW_TOS = sorted((REPOSITORY / "docs" / "how-to").glob("*.md"))
PASTED = [page for page in HOW_TOS if any(block.can_be_pasted for block in blocks(page))]
TWICE = [REPOSITORY / "README.md", REPOSITORY / "docs" / "tutorial.md"]


def named(page: Path) -> str:
    return page.relative_to(REPOSITORY).with_suffix("").as_posix()


def test_code_blocks_of_pages_are_whole_and_are_run_or_shown() -> None:
    faults: list[str] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        unknown = {block.language for block in blocks(page)} - RUN - SHOWN
        faults += [f"{named(page)}: {kind} is neither run nor shown" for kind in unknown]
        faults += [f"{named(page)}: {mark}" for mark in re.findall(r"^[<>]{7} .*", text, re.MULTILINE)]
        if len(re.findall(r"^\s*```", text, re.MULTILINE)) != 2 * len(blocks(page)):
            faults.append(f"{named(page)}: a fence is indented or not closed")
    assert not faults, "\n".join(faults)


def test_readme_has_two_commands_for_a_stranger_which_the_check_runs() -> None:
    """`.ci/run` takes every line of a `sh` block of the README for one; what is only shown there is `bash`."""
    commands = [
        line for block in blocks(REPOSITORY / "README.md") if block.language == "sh" for line in block.text.splitlines()
    ]
    demo, tests = commands
    assert demo.split(" && ")[1::2] == [". .venv/bin/activate", "fscoord demo"]
    assert tests.rpartition("/bin/")[2] == "tox run -e py"


def test_how_to_pages_are_all_in_their_index() -> None:
    index = (REPOSITORY / "docs" / "how-to.md").read_text(encoding="utf-8")
    missing = [page.name for page in (REPOSITORY / "docs" / "how-to").iterdir() if f"(how-to/{page.name})" not in index]
    assert missing == [], "docs/how-to.md has no line for these"


def test_pages_that_code_and_contributors_name_are_there() -> None:
    """Sphinx checks the links of the pages. A page that was merged into another may be named in other files, too."""
    texts = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.py"), *REPOSITORY.glob("packaging/**/*.md")]
    for folder in ("fscoord", "pytest_fscoord", "packaging", "examples", "benchmarks", "tests"):
        texts += (REPOSITORY / folder).glob("**/*.py")
    pages = {
        (page, each.relative_to(REPOSITORY).as_posix())
        for each in texts
        for page in re.findall(r"\bdocs/[a-z0-9/-]+\.md\b", each.read_text(encoding="utf-8"))
    }
    assert pages
    assert [each for each in sorted(pages) if not (REPOSITORY / each[0]).exists()] == []


@pytest.mark.parametrize(
    "name", ["architecture", "architecture/operations", "architecture/recovery", "campaigns", "format"]
)
def test_list_at_the_top_of_a_long_page_has_its_sections_in_their_order(name: str) -> None:
    text = (REPOSITORY / "docs" / "contributors" / f"{name}.md").read_text(encoding="utf-8")
    top, _, rest = text.partition("\n## ")
    sections = re.findall(r"^## (.+)$", "## " + rest, re.MULTILINE)
    assert len(sections) >= 4
    listed = re.findall(r"^(?:-|\d+\.) \[[^]]+\]\(#([\w-]+)\)", top, re.MULTILINE)
    assert listed == [re.sub(r"[^\w -]", "", section).lower().replace(" ", "-") for section in sections]


def test_recipes_are_all_in_a_how_to() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (REPOSITORY / "docs" / "how-to").glob("*.md"))
    imported = set(re.findall(r"\w+", " ".join(re.findall(r"^from fscoord.recipes import (.+)$", text, re.MULTILINE))))
    told_of = {name for name in recipes.__all__ if name[0].isupper()} - RESULTS
    assert told_of | {"once"} <= imported


DESTROYS = {
    r"--basetemp": "pytest empties that directory: leave it out, or set TMPDIR",
    r"\brm\b[^\n;&|]*[\w\"]\*": "name the files of the store, and those that begin with its name and a dot",
    r"\brm -\w*r": "name the files",
    r"\bmkdir [^\n&]*;[^\n]*(\bmv\b|>)": "a directory that exists is used: write && after mkdir",
    r"\bmv (?!-n)\S+ [^\s/]+(;|$)": "write mv -n",
    r"> *(report|log|out|output)\b": "a reader may have a file of this name",
}


def test_command_of_a_page_destroys_no_file_of_the_reader() -> None:
    """Readers run the commands in their own directories."""
    wrong: list[str] = []
    for page in PAGES:
        shown = [block.text for block in blocks(page) if block.language in {"console", "sh", "bash"}]
        each = [(text, line) for text in shown for line in text.splitlines()]
        lines = [line for text, line in each if line.startswith("$ ") or "\n$ " not in f"\n{text}"]
        lines += re.findall(r"`([^`]+)`", FENCE.sub("", page.read_text(encoding="utf-8")))
        wrong += [
            f"{named(page)}: {line}: {advice}"
            for line in lines
            for found, advice in DESTROYS.items()
            if re.search(found, line)
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", RUNNABLE, ids=named)
def test_code_of_a_page_runs_as_the_page_says(page: Path, tmp_path: Path) -> None:
    """A user runs the first programs again; so those pages run twice, in one directory."""
    times = 2 if page in TWICE else 1
    assert run(page, tmp_path, str(times)) == times * sum(block.language in RUN for block in blocks(page))


@pytest.mark.parametrize("page", PASTED, ids=named)
def test_block_of_a_how_to_can_be_pasted_alone(page: Path, tmp_path: Path) -> None:
    """Into a fresh interpreter, in an empty directory; commands tell a story in its order, and are left out."""
    assert run(page, tmp_path, "alone") == sum(block.can_be_pasted for block in blocks(page))


def run(page: Path, tmp_path: Path, *how: str) -> int:
    """Return how many blocks of the page `pages` has run; what they print if one fails is the failure's text."""
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "tmp").mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(SET_BY_OTHERS)}
    environment["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), environment["PATH"]])
    environment["TMPDIR"] = str(tmp_path / "tmp")
    environment["PYTEST_DEBUG_TEMPROOT"] = str(tmp_path)  # pytest keeps the files of its last runs there
    done = subprocess.run(
        [sys.executable, pages.__file__, str(page), *how],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, f"{page.name}:\n{done.stdout}"
    assert list((tmp_path / "tmp").iterdir()) == [], "the page leaves temporary files behind"
    return int(json.loads(done.stdout.splitlines()[-1]))
