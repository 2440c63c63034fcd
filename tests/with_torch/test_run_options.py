"""The options of `fscoord run` beside those of the real torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.api import to_map
from torch.distributed.run import get_args_parser

from fscoord.cli.run import REFUSED, run
from fscoord.launch import Streams, parse_streams

pytestmark = pytest.mark.torch

PAGE = Path(__file__).parent.parent.parent / "docs" / "torch.md"


def test_table_has_a_row_for_each_option_of_the_installed_torchrun() -> None:
    theirs = {name for action in get_args_parser()._actions for name in action.option_strings} - {"-h", "--help"}
    ours = {name for option in run.params if isinstance(option, click.Option) for name in option.opts}
    rows = dict(
        re.findall(r"^\| `(--[a-z-]+)` \| (there|refused: .+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    )
    dashed = {name[:2] + name[2:].replace("_", "-") for name in theirs}
    assert len(dashed) > 25
    assert {name for name in dashed if len(name) == 2} <= ours  # -m, -r and -t
    missing = {name for name in dashed if len(name) > 2} - set(rows)
    assert missing == set(), "decide about them in fscoord/cli/run.py, and run python docs/torchrun_options.py"
    for name, text in rows.items():
        assert text == ("refused: " + REFUSED[name] if name in REFUSED else "there")
        assert name in ours


@pytest.mark.parametrize(
    "text", ["0", "1", "2", "3", "0:3", "0:3,1:0,2:1,3:2", "1,2", "0:1,3", "3,0:1", "4", "0:4", ""]
)
def test_streams_go_where_torchrun_sends_them(text: str) -> None:
    try:
        theirs = Std.from_str(text)
    except ValueError:
        with pytest.raises(ValueError):
            parse_streams(text)
        return
    found = to_map(theirs, 5)
    streams = Streams(redirects=parse_streams(text))
    for local_rank in range(5):
        for stream in (Std.OUT, Std.ERR):
            assert streams.is_file(local_rank, stream) == bool(found[local_rank] & stream)
