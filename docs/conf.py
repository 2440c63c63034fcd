"""How the documentation is built: `tox -e docs`."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

import fscoord

ON_THE_INDEX = False
"""Whether fscoord is on the package index.

The install lines of the pages are for a checkout, so they are true before a release. With True the built pages install
from the index instead. README.md has one such line of its own, under "Install".
"""


def title(fullname: str) -> str:
    """Return the title of the page of this name."""
    return fullname.removeprefix("fscoord.")


def members_of(fullname: str) -> dict[str, list[str]]:
    """Return the members that the page of a class shows, those with a docstring from fscoord, by their kind."""
    module, _, name = fullname.rpartition(".")
    shown = getattr(importlib.import_module(module), name)
    documented: dict[str, str] = {}  # in the order of the source, those of the class before those of its bases
    for base in shown.__mro__:
        if not base.__module__.startswith("fscoord."):
            continue
        analyzer = ModuleAnalyzer.for_module(base.__module__)
        attributes = {member for owner, member in analyzer.find_attr_docs() if owner == base.__qualname__}
        for member in sorted({*vars(base), *attributes}, key=lambda each: order(analyzer, base, each)):
            value = inspect.getattr_static(base, member, None)
            if inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod)):
                kind = "method"
            else:
                kind = "property" if isinstance(value, property) else "attribute"
            has_docstring = member in attributes or (kind != "attribute" and inspect.getdoc(getattr(shown, member)))
            # The suite for stores is a class of tests, whose names say what they test.
            if has_docstring and not member.startswith(("_", "test_")):
                documented.setdefault(member, kind)
    kinds = ("method", "property", "attribute")
    return {kind: [member for member in documented if documented[member] == kind] for kind in kinds}


def order(analyzer: ModuleAnalyzer, owner: type, member: str) -> int:
    """Return the place of a member in the source of its class."""
    return analyzer.tagorder.get(f"{owner.__qualname__}.{member}", 0)


project = "fscoord"
author = "The fscoord authors"
copyright = "2026, the fscoord authors"
version = release = fscoord.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.graphviz",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # copies what a user types, without prompts and output
copybutton_prompt_is_regexp = True
copybutton_here_doc_delimiter = "EOF"
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"fscoord\.(recipes\.holdings\.LineState|collectives\.rounds\.RoundState)"),  # see `fscoord.status`
    # Type variables, and a base, an argument and a coroutine of what nobody makes, which have no page; names of the
    # standard library and of type aliases: this build looks nothing up on the network.
    (
        "py:class",
        r"fscoord\.(store\.S|barriers\.(base\.)?[BC]|recipes\.(_hold\.(H|Exclusive)|_item\.(Items|Claim|Content)))",
    ),
    ("py:class", r"fscoord\.(_arguments\.(Compared|Set|Added)Key|recipes\.lock\.Side)"),
    ("py:class", r"fscoord\.(.*\.D|aio\.(store\.Opening|_driver\.StoreDriver))"),
    ("py:class", r"fscoord\.(rendezvous\.handler\.H|stores\.etcd\.GatewayClient)"),
    ("py:.*", r"(?!fscoord)(?!FileStore|HashStore|PrefixStore|Store|.*Error$).*"),
]
default_role = "py:obj"

myst_heading_anchors = 3
html_theme = "furo"
html_title = f"fscoord {release}"
html_theme_options = {"light_logo": "logo-light.svg", "dark_logo": "logo-dark.svg"}
html_favicon = "static/logo-light.svg"

graphviz_output_format = "svg"  # of docs/drawings, by Graphviz' `dot`; without that program the build warns, and fails

autosummary_generate = True  # a page for each name in the tables of docs/api.md, in docs/api/
suppress_warnings = ["config.cache"]  # the functions of the next line can't be kept for the next build
autosummary_context = {"title": title, "members_of": members_of}
templates_path = ["templates"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True  # mode=0o600
python_maximum_signature_line_length = 90
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def install_from_index(_app: Sphinx, name: str, source: list[str]) -> None:
    """Make the install lines of a page true for the package index, if `ON_THE_INDEX`; one page has both."""
    if ON_THE_INDEX and name != "install":
        source[0] = re.sub(r"pip install '\.(\[[a-z,]+\])'", r"pip install 'fscoord\1'", source[0])
        source[0] = source[0].replace("pip install .`", "pip install fscoord`").replace(" (in a checkout)", "")


def keep_colons(_app: Sphinx, what: str, _name: str, _member: object, _options: object, lines: list[str]) -> None:
    """Put the words before a colon, which napoleon takes for the type of an attribute, back into the first line."""
    if what not in {"attribute", "data", "property"}:
        return
    for number, line in enumerate(lines):
        if line.startswith(":type: "):
            lines[0] = f"{line.removeprefix(':type: ')}: {lines[0]}"
            del lines[number]
            return


def measure_columns(_app: Sphinx, page: nodes.document) -> None:
    """Mark the cells of each table by the longest text of their column, so that no column of sentences is squeezed."""
    for table in page.findall(nodes.table):
        for column in zip(*(row.children for row in table.findall(nodes.row)), strict=True):
            longest = max(len(cell.astext()) for cell in column)
            for cell in column:
                cell["classes"].append("wide" if longest > 50 else "medium" if longest > 12 else "narrow")


def keep_together(_app: Sphinx, page: nodes.document) -> None:
    """Mark short code in sentences and tables, which no line may break: the dashes of an option belong to its name."""
    for literal in page.findall(nodes.literal):
        text = literal.astext()
        if len(text) <= (24 if text.startswith("-") else 16):
            literal["classes"].append("short")


def record_demonstration(app: Sphinx, failure: Exception | None) -> None:
    """Put a recording of this version's demonstration in place of the one in the repository."""
    shown = Path(app.outdir, app.builder.imagedir, "demo.svg")
    if failure is None and shown.exists():
        subprocess.run(  # noqa: S603 - our own program
            [sys.executable, Path(app.confdir, "recording.py"), shown], check=True, timeout=300
        )


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", install_from_index)
    app.connect("doctree-read", measure_columns)
    app.connect("doctree-read", keep_together)
    app.connect("build-finished", record_demonstration)
    app.connect("autodoc-process-docstring", keep_colons, priority=600)  # after napoleon
