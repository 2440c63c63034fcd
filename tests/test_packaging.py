"""What `packaging/` holds agrees with the package: recipes, manual pages, and the program that makes a release."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fscoord

pytestmark = pytest.mark.once

REPOSITORY = Path(__file__).parent.parent
PACKAGING = REPOSITORY / "packaging"
SPACK = PACKAGING / "spack/spack_repo/fscoord/packages"
PROJECT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"packaging_{name}", PACKAGING / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = load("release")
URL = "https://host.test/group/fscoord"


def required(name: str) -> dict[str, str]:
    """Return the ranges of a list of requirements in pyproject.toml, by the name of the package."""
    held = re.search(rf"^{name} = \[(.*?)\]", PROJECT, re.MULTILINE | re.DOTALL)
    assert held is not None
    return dict(re.findall(r'"([\w-]+)(>=[\d.]+(?:,<[\d.]+)?)"', held[1]))


CORE, CLI, ETCD = required("dependencies"), required("cli"), required("etcd")


# The recipes


def spack_range(wanted: str) -> str:
    """Return a range of pyproject.toml as Spack writes it: ``>=4.0.0,<5`` is ``4.0.0:4``."""
    low, _, high = wanted.removeprefix(">=").partition(",<")
    return f"{low}:{int(high) - 1 if high else ''}"


def test_spack_recipe_has_the_version_and_the_requirements_of_the_package() -> None:
    recipe = (SPACK / "py_fscoord/package.py").read_text(encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(recipe)) if isinstance(node, ast.Call)]
    said = {}
    for call in calls:
        if ast.unparse(call.func) == "depends_on":
            when = [ast.literal_eval(each.value) for each in call.keywords if each.arg == "when"]
            said[ast.literal_eval(call.args[0])] = when[0] if when else ""
    wanted = {f"py-{name}@{spack_range(versions)}": "" for name, versions in CORE.items()}
    wanted |= {f"py-{name}@{spack_range(versions)}": "+cli" for name, versions in CLI.items()}
    wanted |= {f"py-{name}@{spack_range(versions)}": "+etcd" for name, versions in ETCD.items()}
    wanted |= {f"py-{name}@{spack_range(versions)}": "" for name, versions in required("requires").items()}
    wanted["python@3.10:"] = ""
    assert said == wanted
    assert re.findall(r'version\("(.+?)"\)', recipe) == [fscoord.__version__]
    assert 'license("BSD-3-Clause")' in recipe


def test_spack_packages_beside_it_are_within_the_allowed_ranges() -> None:
    for name, wanted in CORE.items():
        recipe = (SPACK / f"py_{name}/package.py").read_text(encoding="utf-8")
        low, _, high = wanted.removeprefix(">=").partition(",<")
        versions = re.findall(r'version\("([\d.]+)", sha256="[0-9a-f]{64}"\)', recipe)
        assert versions[-1] == low, "the oldest that is allowed"
        assert all(int(low.split(".")[0]) <= int(version.split(".")[0]) < int(high) for version in versions)


def test_conda_recipe_has_the_version_and_the_requirements_of_the_package() -> None:
    recipe = (PACKAGING / "conda/recipe.yaml").read_text(encoding="utf-8")
    assert re.findall(r'^  version: "(.+)"$', recipe, re.MULTILINE) == [fscoord.__version__]
    sections = dict(re.findall(r"^  (host|run|run_constraints):\n((?:    .*\n)+)", recipe, re.MULTILINE))
    found = {name: dict(re.findall(r"- (\w+) (.+)", text)) for name, text in sections.items()}
    assert found["run"] == {"python": ">=3.10"} | CORE | CLI
    assert found["host"] == {"python": ">=3.10"} | required("requires")
    assert found["run_constraints"]["urllib3"] == ETCD["urllib3"]
    assert f"- fscoord = {re.findall(r'^fscoord = .(fscoord.cli:main).$', PROJECT, re.MULTILINE)[0]}" in recipe


def test_citation_has_the_version_and_the_date_of_the_release() -> None:
    said = dict(
        re.findall(r'^([\w-]+): "?([^"\n]+)"?$', (REPOSITORY / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    )
    assert said["version"] == fscoord.__version__
    assert said["date-released"] == release.release_date(REPOSITORY, fscoord.__version__).date().isoformat()
    assert said["license"] == "BSD-3-Clause"


def test_hooks_use_the_linter_of_the_checks() -> None:
    hooks = (REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    linter = re.findall(r'^lint = \["(.+)"\]$', PROJECT, re.MULTILINE)
    assert set(re.findall(r'"(ruff[^"]+)"', hooks)) == set(linter)


def test_workflow_runs_the_stages_that_the_check_has() -> None:
    check = (REPOSITORY / ".ci/run").read_text(encoding="utf-8")
    stages = set(" ".join(re.findall(r"^STAGES=\((.+)\)$", check, re.MULTILINE)).split())
    assert set(re.findall(r"^    ([\w.]+)\) stage ", check, re.MULTILINE)) == stages
    workflow = (REPOSITORY / ".github/workflows/check.yml").read_text(encoding="utf-8")
    run = set(re.findall(r"stage: \[(.+)\]", workflow)[0].split(", "))
    assert run == stages - {"nfs"}


def test_check_refuses_a_stage_that_it_does_not_have() -> None:
    done = subprocess.run(["bash", ".ci/run", "nosuch"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no stage nosuch; the stages are: readme " in done.stderr


def test_classifiers_name_the_pythons_that_are_tested() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert named == [*release.PYTHONS, "3.14"]  # which a machine that makes a release need not have
    environments = re.findall(r"^env_list = (.+)$", (REPOSITORY / "tox.ini").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"py3(\d+)", environments[0]) == [version.partition(".")[2] for version in named]


def test_tox_skips_a_python_that_is_missing_but_the_continuous_check_does_not() -> None:
    assert "\nskip_missing_interpreters = true\n" in (REPOSITORY / "tox.ini").read_text(encoding="utf-8")
    assert " --skip-missing-interpreters false " in (REPOSITORY / ".ci/run").read_text(encoding="utf-8")


# The manual pages and the completions


def test_manual_pages_and_completions_are_those_of_the_command(tmp_path: Path) -> None:
    shutil.copy(PACKAGING / "manual.py", tmp_path)
    shutil.copytree(PACKAGING / "share", tmp_path / "share")

    def check() -> subprocess.CompletedProcess[str]:
        words = [sys.executable, str(tmp_path / "manual.py"), "--check"]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    done = check()
    assert (done.returncode, done.stdout) == (0, ""), "run packaging/manual.py"
    (tmp_path / "share/man/man1/fscoord-lock.1").write_text("old", encoding="utf-8")
    (tmp_path / "share/man/man1/fscoord-gone.1").write_text("a verb that is gone", encoding="utf-8")
    done = check()
    assert done.returncode == 1
    assert re.findall(r"^man/man1/(\S+) is not", done.stdout, re.MULTILINE) == ["fscoord-lock.1", "fscoord-gone.1"]


def test_manual_page_keeps_examples_and_shows_dashes_and_dots_as_they_are() -> None:
    manual = load("manual")
    assert list(manual.paragraphs("Two\nlines.\n\n\b\nExamples:\n  a -b\n./c \\d")) == [
        ".PP\nTwo lines.",
        ".PP\n.nf\nExamples:\n  a \\-b\n\\&./c \\ed\n.fi",
    ]


# The release


def test_release_needs_a_dated_entry_and_notes(tmp_path: Path) -> None:
    (tmp_path / "fscoord").mkdir()
    (tmp_path / "fscoord/__init__.py").write_text('__version__ = "2.0"\n', encoding="utf-8")
    changelog = tmp_path / "CHANGELOG.md"
    for text, match in (
        ("# Changelog\n\n## 1.0 (2026-01-01)\n\nold\n", "no entry for 2.0"),
        ("# Changelog\n\n## 2.0 (not released)\n\nnew\n", "not dated, but says 'not released'"),
    ):
        changelog.write_text(text, encoding="utf-8")
        with pytest.raises(release.Failed, match=match):
            release.version(tmp_path)
    changelog.write_text("# Changelog\n\n## 2.0 (2026-02-03)\n\nnew\n\n## 1.0 (2026-01-01)\n\nold\n", encoding="utf-8")
    assert release.version(tmp_path) == "2.0"
    assert release.release_date(tmp_path, "2.0").timestamp() == 1770076800
    with pytest.raises(release.Failed, match=r"packaging/notes/2\.0\.md is missing"):
        release.notes(tmp_path, "2.0")
    (tmp_path / "packaging/notes").mkdir(parents=True)
    (tmp_path / "packaging/notes/2.0.md").write_text("# Two\n", encoding="utf-8")
    assert release.notes(tmp_path, "2.0") == "# Two\n\n## All changes\n\nnew\n"


def test_release_of_this_version_has_its_date_and_its_notes() -> None:
    assert release.version() == fscoord.__version__ == "0.1.0"
    assert release.notes(REPOSITORY, "0.1.0").startswith("# fscoord 0.1.0\n")


def test_builds_that_differ_fail(tmp_path: Path) -> None:
    files = []
    for name, text in (("a", "same"), ("b", "same"), ("c", "other")):
        (tmp_path / name).mkdir()
        files.append(tmp_path / name / "fscoord-1.tar.gz")
        files[-1].write_text(text, encoding="utf-8")
    release.compare([files[0]], [files[1]])
    with pytest.raises(release.Failed, match=r"two builds of fscoord-1\.tar\.gz differ"):
        release.compare([files[0]], [files[2]])
    with pytest.raises(release.Failed, match="two builds gave"):
        release.compare([files[0]], [])


def test_output_loses_an_earlier_release_and_nothing_else(tmp_path: Path) -> None:
    for name in ("fscoord-0.0.1.tar.gz", "SHA256SUMS"):
        (tmp_path / name).write_text("old", encoding="utf-8")
    release.make_empty(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(release.Failed, match=r"holds what is no part of a release: thesis\.txt"):
        release.make_empty(tmp_path)
    assert (tmp_path / "thesis.txt").read_text(encoding="utf-8") == "mine"


def test_step_that_fails_is_named_and_the_next_one_runs(capsys: pytest.CaptureFixture[str]) -> None:
    steps = release.Steps()
    assert steps.run("first", lambda: release.run(sys.executable, "-c", "print('said'); exit(3)")) is None
    assert steps.run("second", lambda: 7) == 7
    assert steps.failed == ["first"]
    said = capsys.readouterr().out
    assert "exited with 3:\nsaid\n" in said
    assert re.search(r"^first +\d+\.\d s  FAILED$", said, re.MULTILINE)
    assert re.search(r"^second +\d+\.\d s  passed$", said, re.MULTILINE)


def test_spack_recipe_of_a_release_has_the_checksum_of_its_archive() -> None:
    recipe = (SPACK / "py_fscoord/package.py").read_text(encoding="utf-8")
    made = release.with_checksum(recipe, fscoord.__version__, "0" * 64)
    assert f'    version("{fscoord.__version__}", sha256="{"0" * 64}")\n' in made
    assert "does not know" not in made
    ast.parse(made)
    with pytest.raises(release.Failed, match="no line version"):
        release.with_checksum(recipe, "9.9", "0" * 64)


def test_install_lines_become_true_for_the_index_by_one_switch(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/conf.py", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    for wrong in ("", "http://x.test/a", "https://x.test", "https://x.test/a/"):
        with pytest.raises(release.Failed, match="https address"):
            release.put_on_the_index(tmp_path, fscoord.__version__, wrong)
    release.put_on_the_index(tmp_path, fscoord.__version__, URL)
    readme, before = ((place / "README.md").read_text(encoding="utf-8") for place in (tmp_path, REPOSITORY))
    assert "Run `pip install 'fscoord[cli]'`." in readme
    assert re.findall(r"^```sh\n.*?^```$", readme, re.MULTILINE | re.DOTALL) == re.findall(
        r"^```sh\n.*?^```$", before, re.MULTILINE | re.DOTALL
    )
    assert "ON_THE_INDEX = True" in (tmp_path / "docs/conf.py").read_text(encoding="utf-8")
    with pytest.raises(release.Failed, match="does not say once"):
        release.put_on_the_index(tmp_path, fscoord.__version__, URL)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)#\s]+)", readme) + re.findall(r'(src)(?:set)?="([^"]+)"', readme)
    assert [link for _, link in links if not link.startswith("https://")] == []
    for is_picture, link in links:
        if link.startswith(URL):
            kind, _, path = link.removeprefix(URL + "/").partition("/main/")
            assert (kind, (REPOSITORY / path).exists()) == ("raw" if is_picture else "blob", True)
    project = (tmp_path / "pyproject.toml").read_text(encoding="utf-8")
    assert project.count(f'Homepage = "{URL}"\n') == 1
    assert project.replace(release.URLS.format(url=URL), "") == PROJECT


def test_archive_holds_every_file_that_its_checks_need() -> None:
    held = set(re.findall(r'"/([\w./-]+)"', PROJECT.partition("targets.sdist]")[2].partition("]")[0]))
    there = {
        "packaging",
        "CITATION.cff",
        "SECURITY.md",
        ".pre-commit-config.yaml",
        ".github",
        ".ci",
        "tox.ini",
        "tests",
    }
    assert there <= held
    assert [name for name in held if not (REPOSITORY / name).exists()] == []
