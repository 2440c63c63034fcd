"""What the installed torch lacks: a test that needs it is skipped, with a reason that begins with `LACKS`.

By that .ci/count.py knows the reason, and accepts the skip if the newest torch has run the test.
"""

from __future__ import annotations

import pytest

LACKS = "this torch lacks "


def needs(owner: type, name: str) -> pytest.MarkDecorator:
    """Return the mark of a test that needs the attribute `name` of `owner`, a class of torch."""
    return pytest.mark.skipif(not hasattr(owner, name), reason=f"{LACKS}{owner.__name__}.{name}")
