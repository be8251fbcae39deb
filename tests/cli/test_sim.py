"""`holdfast sim` end to end, on a trace small enough to know the answer."""

import argparse
import gzip
import json
import re
import shlex
from html import unescape
from xml.etree import ElementTree as ET

import pytest

from holdfast.cli import main
from holdfast.cli.sim import add_arguments

LADDER = """
engine: {prefill: {a: 0.01, b: 0.001}}
token_bytes: 1000
tiers:
  - {kind: host, capacity: 1 MiB}
  - {kind: disk, capacity: 100 MiB, read_bytes_per_s: 1e9}
"""


@pytest.fixture
def files(tmp_path):
    ladder, trace = tmp_path / "small.yaml", tmp_path / "made.jsonl.gz"
    ladder.write_text(LADDER)
    lines = [
        {"timestamp": 0, "input_length": 1_024, "output_length": 10, "hash_ids": [0, 1]},
        {"timestamp": 9_000, "input_length": 1_536, "output_length": 10, "hash_ids": [0, 1, 2]},
    ]
    trace.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return [str(trace), "--ladder", str(ladder)]


def test_sim_reports_its_figures_as_rows_and_as_a_table(files, tmp_path, capsys):
    out = tmp_path / "sim.json"
    assert main(["sim", *files, "--json", str(out)]) == 0
    rows = {row["what"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["sim.hit.tokens"]["value"] == pytest.approx(1_024 / 2_560)
    assert rows["sim.best.tokens"]["value"] == pytest.approx(1_024 / 2_560)
    assert rows["sim.tier.0.host"]["blocks"] + rows["sim.tier.1.disk"]["blocks"] == 2
    assert rows["sim.ttft.p99"]["value"] == pytest.approx(0.01 + 1.024, rel=0.01)
    assert rows["sim.ttft.p99"]["without_ladder_s"] == pytest.approx(0.01 + 1.536, rel=0.01)
    assert rows["sim.curve.lru"]["points"][-1] == [3, pytest.approx(0.4)]
    shown = capsys.readouterr().out
    assert "host" in shown
    assert "hit tokens" in shown
    assert "; small, 1 worker\n" in shown
    assert re.search(
        r"^gpu busy .* of the engines there are \(.* prefill, .* decode\)$", shown, re.MULTILINE
    )


def test_json_on_standard_output_is_nothing_but_json(files, capsys):
    assert main(["sim", *files, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "sim"


@pytest.mark.parametrize("option", ["--svg", "--html"])
def test_a_picture_or_page_on_standard_output_is_nothing_else(files, capsys, option):
    assert main(["sim", *files, option, "-"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(("<svg", "<?xml", "<!doctype html>", "<!DOCTYPE html>"))
    assert "hit tokens  " not in shown


def test_the_rows_state_the_setting_and_the_assumptions(files, tmp_path, capsys):
    out, roomy = tmp_path / "sim.json", tmp_path / "roomy.yaml"
    roomy.write_text(LADDER.replace("MiB", "GiB"))
    model = ["--model", "Llama-3.1-8B", "--workers", "2"]
    assert main(["sim", *files[:-1], str(roomy), *model, "--json", str(out)]) == 0
    first, *rows = json.loads(out.read_text())["rows"]
    assert first["what"] == "sim.setting"
    assert (first["trace"], first["ladder"], first["workers"]) == ("made", "roomy", 2)
    assert first["model"] == "meta-llama/Meta-Llama-3.1-8B"
    assert first["command"].startswith(f"holdfast sim {files[0]} --ladder {roomy} --model Llama-3")
    shown = capsys.readouterr().out
    assert "; roomy, meta-llama/Meta-Llama-3.1-8B, 2 workers" in shown
    assert (rows[-1]["what"], rows[-1]["cached"]) == ("sim.vllm", "yes")
    assert rows[-1]["says"] in shown
    said = [row["says"] for row in rows if row["what"] == "sim.assumption"]
    assert said == [line.removeprefix("- ") for line in shown.splitlines() if line[:2] == "- "]


def test_counts_are_shown_unrounded(files, tmp_path, capsys):
    trace = tmp_path / "many.jsonl"
    line = {"input_length": 512, "output_length": 1, "hash_ids": [0]}
    lines = [json.dumps({"timestamp": 1_000 * n, **line}) for n in range(1_234)]
    trace.write_text("\n".join(lines))
    assert main(["sim", str(trace), *files[1:]]) == 0
    shown = capsys.readouterr().out
    assert "many: 1,234 requests, " in shown
    assert re.search(r"^requests +1,234 requests$", shown, re.MULTILINE)


def test_wear_is_shown_beside_the_rating_of_the_drives(files, tmp_path, capsys):
    drives = tmp_path / "drives.yaml"
    drives.write_text(LADDER.replace("100 MiB,", "100 MiB, medium: nvme-tlc,"))
    assert main(["sim", *files[:-1], str(drives)]) == 0
    says = r"^writes per day 1 disk .* the drives bought \(rated for 1; .* the tier.s capacity\)$"
    assert re.search(says, capsys.readouterr().out, re.MULTILINE)


def test_the_page_and_the_picture_load_no_external_resource(files, tmp_path):
    html, svg = tmp_path / "sim.html", tmp_path / "sim.svg"
    assert main(["sim", *files, "--html", str(html), "--svg", str(svg), "--hints"]) == 0
    page, picture = html.read_text(), svg.read_text()
    assert ET.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    assert page.count("<svg") == 4
    assert f"holdfast sim {files[0]} --ladder {files[2]}" in page
    for text in (page, picture):
        rest = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?://|<script|<link|<img|@import|url\(", rest)
    assert "40.0%" in page


@pytest.mark.parametrize("option", ["--html", "--svg", "--json"])
def test_a_place_that_can_not_be_written_is_named_before_the_work(files, option, capsys):
    # Its folder would have to lie below a file.
    assert main(["sim", *files[:-1], "/no/ladder", option, f"{files[0]}/sim.out"]) == 2
    assert f"holdfast sim: {option}: cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--html", "--svg"])
def test_a_command_that_is_refused_leaves_old_results_alone(files, option, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("of last week")
    for target in (old, new):
        assert main(["sim", *files, "--router", "coin", option, str(target)]) == 2
    assert old.read_text() == "of last week"
    assert not new.exists()


def test_the_page_says_the_whole_command(files, tmp_path):
    (tmp_path / "my prices.yaml").write_text("site: {dollars_per_kwh: 0.5}")
    said = ["--prices", str(tmp_path / "my prices.yaml"), "--block-tokens", "512"]
    sizes = dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers"), 2)
    sizes |= {"vocab_size": 9, "intermediate_size": 9, "max_position_embeddings": 9_999}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    said += ["--model", str(tmp_path / "config.json"), "--weights-dtype", "fp8"]
    assert main(["sim", *files, *said, "--hints", "--html", str(tmp_path / "sim.html")]) == 0
    [shown] = re.findall(r"holdfast (sim [^<]*)<", (tmp_path / "sim.html").read_text())
    typed = shlex.split(unescape(shown))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    again = vars(parser.parse_args(typed[1:]))
    meant = vars(parser.parse_args([*files, *said, "--hints"]))
    assert again == meant


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--router", "coin"], "--router: 'coin' is not known; use one of: round_robin"),
        (["--workers", "0"], "--workers: 0 is not from 1 to 1,000"),
        (["--model", "nobody"], "model 'nobody': not one of"),
        (["--weights-dtype", "fp8"], "--weights-dtype: needs a model; add --model"),
        (["--model", "qwen3-8b", "--weights-dtype", "x"], "--weights-dtype 'x': not known"),
    ],
)
def test_wrong_options_are_named(files, more, says, capsys):
    assert main(["sim", *files, *more]) == 2
    assert says in capsys.readouterr().err


def test_contexts_that_are_too_long_for_the_model_are_counted(files, tmp_path, capsys):
    lines = [
        {"timestamp": 0, "input_length": 512 * n, "output_length": 1, "hash_ids": list(range(n))}
        for n in (10, 80, 81, 100)  # Qwen3-8B takes 80 * 512 tokens
    ]
    trace, roomy = tmp_path / "long.jsonl", tmp_path / "roomy.yaml"
    roomy.write_text(LADDER.replace("MiB", "GiB"))
    files[-1] = str(roomy)
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["sim", str(trace), *files[1:], "--model", "Qwen3-8B"]) == 2
    says = "takes at most 40,960 tokens (max_position_embeddings), but 2 of the 4 requests of long"
    assert f"{says} are longer, the longest 51,200; name another" in capsys.readouterr().err
    trace.write_text(json.dumps(lines[1]) + "\n")
    assert main(["sim", str(trace), *files[1:], "--model", "Qwen3-8B"]) == 0
    capsys.readouterr()


def test_an_unknown_trace_names_the_shipped_ones(files, capsys):
    assert main(["sim", "nosuch", *files[1:]]) != 0
    assert "nosuch: neither a file nor a shipped trace; shipped are: conversation" in (
        capsys.readouterr().err
    )
