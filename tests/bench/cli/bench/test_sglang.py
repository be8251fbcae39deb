"""`holdfast bench sglang` without SGLang: a row that says why nothing was measured."""

import json

from holdfast.cli import main


def test_without_sglang_the_row_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    target = tmp_path / "report.json"
    assert main(["bench", "sglang", "--quick", "--json", str(target)]) == 0
    [row] = json.loads(target.read_text())["rows"]
    assert row["value"] is None
    assert "make sglang" in row["why"]
