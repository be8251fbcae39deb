"""Reports have one shape, in JSON and on screen."""

import io
import json
import re

import pytest
from rich.console import Console

from holdfast import __version__, report
from holdfast.errors import ConfigError, HoldfastError
from holdfast.report import Report, Row


def rendered(found, also=(), width=200):
    shown = io.StringIO()
    report.show(Console(width=width, file=shown), found, also)
    return shown.getvalue()


def test_json_has_name_version_machine_and_flat_rows():
    row = report.share("disk.read", 1.61, "GB/s", 1.70, 0.9, cpu_s=0.2)
    document = json.loads(report.to_json(Report("bench tiers", [row])))
    assert document["name"] == "bench tiers"
    assert document["version"] == __version__
    assert document["machine"]["cores"] >= 1
    assert document["machine"]["memory_bytes"] > 1 << 20
    assert document["machine"]["cpu"]
    assert document["rows"] == [
        {
            "what": "disk.read",
            "value": 1.61,
            "unit": "GB/s",
            "limit": 1.70,
            "ratio": 1.61 / 1.70,
            "goal": 0.9,
            "ok": True,
            "cpu_s": 0.2,
        }
    ]


def test_ok_is_null_where_there_is_no_goal():
    [row] = json.loads(report.to_json(Report("x", [report.at_most("a", 3.0, "ms")])))["rows"]
    assert row["ok"] is None
    assert row["goal"] is None


@pytest.mark.parametrize(
    ("row", "ok"),
    [
        (report.share("a", 85.0, "GB/s", 100.0, 0.85), True),
        (report.share("a", 84.9, "GB/s", 100.0, 0.85), False),
        (report.at_most("a", 3.0, "ms", 3.0), True),
        (report.at_most("a", 3.1, "ms", 3.0), False),
        (report.at_least("a", 20.0, "x", 20.0), True),
        (report.at_least("a", 19.9, "x", 20.0), False),
    ],
)
def test_goals_are_met_at_their_very_value(row, ok):
    assert row.ok is ok


def test_a_report_is_ok_unless_a_goal_was_missed():
    fine = Row(what="a", value=1.0, unit="s")
    missed = report.at_most("b", 2.0, "s", 1.0)
    assert Report("x", [fine]).ok
    assert not Report("x", [fine, missed]).ok
    assert not Report("x", [fine], broken_off=True).ok


def test_writes_to_a_file_and_makes_no_folder(tmp_path):
    target = tmp_path / "x.json"
    report.write(Report("x", []), str(target))
    assert json.loads(target.read_text())["rows"] == []
    with pytest.raises(
        ConfigError, match=r"--json: cannot write .*No such file or directory; choo"
    ):
        report.write(Report("x", []), str(tmp_path / "new" / "x.json"))
    assert list(tmp_path.iterdir()) == [target]


def test_a_dash_writes_to_standard_output(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report.write(Report("x", []), "-")
    assert json.loads(capsys.readouterr().out)["name"] == "x"
    report.write_text("--svg", "-", "<svg/>\n")
    assert capsys.readouterr().out == "<svg/>\n"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_with_the_file_and_the_remedy():
    with pytest.raises(HoldfastError, match=r"--json: '/dev/full' is not complete: No space"):
        report.write_text("--json", "/dev/full", "{}\n")


def test_a_target_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--json: cannot write .*Is a directory"):
        report.write(Report("x", []), str(tmp_path))


def test_the_table_shows_figures_verdicts_and_asked_fields():
    rows = [
        report.share("disk.read", 1.614, "GB/s", 1.7, 0.9, tier="disk"),
        report.at_most("index.block", 251234.0, "bytes", 250.0),
    ]
    text = rendered(Report("bench tiers", rows), also=("tier",))
    assert "holdfast bench tiers" in text
    for shown in ("disk.read", "1.61", "0.949", "disk", "yes", "251,000", "no"):
        assert shown in text


def test_progress_goes_to_standard_error_while_json_takes_the_output(tmp_path):
    assert report.console("-").stderr
    assert not report.console(str(tmp_path / "out.json")).stderr
    assert not report.console(None).stderr


def test_a_column_that_would_be_empty_is_left_out():
    text = rendered(Report("x", [report.at_least("a", 2.0, "x", 1.0)]), also=("tier",))
    assert "goal" in text
    assert "limit" not in text
    assert "tier" not in text


WIDE = Report(
    "bench pool",
    [
        report.share(
            *(f"pool.get.2MiBx32.{number}", 5.94 + number, "GB/s", 6.38, 0.9),
            local_cpu_s_per_gb=0.146,
            remote_cpu_s_per_gb=0.149,
            plain_us=36.6,
        )
        for number in range(3)
    ],
)
ALSO = ("local_cpu_s_per_gb", "remote_cpu_s_per_gb", "plain_us")


@pytest.mark.parametrize("width", range(24, 130))
def test_no_figure_is_cut_however_narrow_the_terminal(width):
    text = rendered(WIDE, ALSO, width)
    assert "…" not in text
    assert max(map(len, re.split(r"\ncolumns omitted", text)[0].splitlines())) <= width
    assert all(figure in text for figure in ("5.94", "6.94", "7.94"))


def test_a_narrow_terminal_omits_the_least_important_columns():
    text = rendered(WIDE, ALSO, 80)
    assert "local_cpu_s_per_gb" in text.splitlines()[2]
    assert (
        "columns omitted on this narrow terminal, see --json: remote_cpu_s_per_gb, plain_us" in text
    )
    assert text.count("0.146") == 3
    assert "36.6" not in text
    assert "columns omitted" not in rendered(WIDE, ALSO, 130)


def test_a_pipe_gets_every_column_at_its_full_width(capsys):
    report.show(report.console(None), WIDE, ALSO)
    text = capsys.readouterr().out
    assert "…" not in text
    assert all(name in text for name in ("limit", "ratio", "goal", *ALSO, "ok"))
    assert all(text.count(figure) == 3 for figure in ("0.146", "0.149", "36.6"))
    assert max(map(len, text.splitlines())) < 130
