"""A slice of every campaign: the same command that anyone can run for as long as they like."""

import json

import pytest

from holdfast.cli import main
from holdfast.testing.campaign import CAMPAIGNS

pytest.importorskip("rich")

SLICES = {"crash": 500, "chaos": 9}


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", [campaign.name for campaign in CAMPAIGNS])
def test_nothing_is_ever_served_wrong(name, tmp_path, capsys):
    figures = tmp_path / "soak.json"
    options = ["--faults", str(SLICES[name]), "--folder", str(tmp_path), "--json", str(figures)]
    status = main(["soak", name, *options])
    rows = json.loads(figures.read_text())["rows"]
    assert [words for row in rows for words in row["failures"]] == []
    assert status == 0, capsys.readouterr().out
    assert sum(row["tried"] for row in rows) >= SLICES[name]
