"""How the documentation is built: `tox -e docs`."""

import fscoord

project = "fscoord"
author = "The fscoord authors"
copyright = "2026, the fscoord authors"
version = release = fscoord.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.graphviz", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = True
nitpick_ignore_regex = [
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

graphviz_output_format = "svg"  # of docs/drawings, by Graphviz' `dot`; without that program the build warns, and fails

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
