"""How the documentation is built: `tox -e docs`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from sphinx.application import Sphinx

import fscoord

ON_THE_INDEX = False
"""Whether fscoord is on the package index.

The install lines of the pages are for a checkout, so they are true before a release. With True the built pages install
from the index instead. README.md has one such line of its own, under "Install".
"""

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
exclude_patterns = ["_build"]
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
        r"fscoord\.(store\.S|barriers\.(base\.)?[BC]|recipes\.(_hold\.(H|Exclusive)|_item\.(Items|Claim)))",
    ),
    ("py:class", r"fscoord\.aio\.store\.Opening"),
    ("py:.*", r"(?!fscoord)(?!FileStore|HashStore|PrefixStore|Store|.*Error$).*"),
]
default_role = "py:obj"

myst_heading_anchors = 3
html_theme = "furo"
html_title = f"fscoord {release}"
html_theme_options = {"light_logo": "logo-light.svg", "dark_logo": "logo-dark.svg"}
html_favicon = "static/logo-light.svg"

graphviz_output_format = "svg"  # of docs/drawings, by Graphviz' `dot`; without that program the build warns, and fails

autosummary_generate = False  # the tables of the reference link to entries on the same page
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def install_from_index(_app: Sphinx, _name: str, source: list[str]) -> None:
    """Make the install lines of a page true for the package index, if `ON_THE_INDEX`."""
    if ON_THE_INDEX:
        source[0] = re.sub(r"pip install '\.(\[[a-z,]+\])'", r"pip install 'fscoord\1'", source[0])
        source[0] = source[0].replace("pip install .`", "pip install fscoord`").replace(" (in a checkout)", "")


def skip_reference_to_contract(
    _app: Sphinx, _what: str, _name: str, member: object, _skip: bool, _options: object
) -> bool | None:
    """Leave out a method of a store that says no more than "See `Store.get`."."""
    return True if re.fullmatch(r"See `Store\.\w+`\.\s*", getattr(member, "__doc__", None) or "") else None


def record_demonstration(app: Sphinx, failure: Exception | None) -> None:
    """Put a recording of this version's demonstration in place of the one in the repository, which the README shows."""
    shown = Path(app.outdir, app.builder.imagedir, "demo.svg")
    if failure is None and shown.exists():
        subprocess.run(  # noqa: S603 - our own program
            [sys.executable, Path(app.confdir, "recording.py"), shown], check=True, timeout=300
        )


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", install_from_index)
    app.connect("build-finished", record_demonstration)
    app.connect("autodoc-skip-member", skip_reference_to_contract)
