"""`holdfast size` as a user meets it."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from holdfast.cli import USAGE, main

LOAD = ["--model", "llama-3.1-70b", "--users", "300", "--context", "40000", "--nodes", "2"]
FEW = ["--media", "ddr5,nvme-tlc"]
TRACE = Path(__file__).resolve().parents[2] / "traces" / "taubench_gpt4o_airline_blk256B.jsonl.gz"


def test_size_proposes_tiers_and_states_its_assumptions(capsys, tmp_path):
    report, picture = tmp_path / "size.json", tmp_path / "size.svg"
    wish = ["--slo-ttft", "1", "--json", str(report), "--svg", str(picture)]
    assert main(["size", *LOAD, *FEW, *wish]) == 0
    shown = capsys.readouterr().out
    for word in ("300 users with 40,000 tokens", "DWPD", "first token", "kWh a day", "assumed"):
        assert word in shown
    rows = json.loads(report.read_text())["rows"]
    by_name = {row["what"]: row for row in rows}
    sized = by_name["size.sized"]
    assert (sized["value"], sized["unit"]) == (1.0, "requests/s")
    assert sized["load"].startswith("300 users with 40,000 tokens")
    assert sized["model"] == "meta-llama/Meta-Llama-3.1-70B"
    assert (sized["gpus"], sized["nodes"], sized["slo_ttft_s"]) == (8, 2, 1.0)
    assert (sized["dtype"], sized["media"]) == ("bf16", ["ddr5", "nvme-tlc"])
    assert by_name["size.ttft"]["ok"] is True
    assert by_name["size.ttft"]["goal"] == 1.0
    tiers = [row for row in rows if row["what"] in ("size.host", "size.disk")]
    assert tiers
    for row in tiers:
        assert row["unit"] == "bytes"
        assert row["bought_as"] in ("channel", "drive")
        assert {"units", "bytes_per_s", "writes_per_day", "watts", "dollars_per_h"} <= set(row)
    assert sum(row["what"] == "size.assumption" for row in rows) >= 8
    assert any(row["what"] == "size.frontier" for row in rows)
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_json_on_standard_output_stands_alone(capsys):
    assert main(["size", *LOAD, *FEW, "--model", "DeepSeek-V3.2", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["name"] == "size"
    assert "hits" in err
    [vllm] = [row for row in json.loads(out)["rows"] if row["what"] == "size.vllm"]
    assert vllm["cached"] == "not_yet"
    assert vllm["says"].startswith("the vLLM connector does not cache this model yet (sparse")
    assert vllm["says"] in err


def test_a_picture_on_standard_output_stands_alone(capsys):
    assert main(["size", *LOAD, *FEW, "--svg", "-"]) == 0
    out, err = capsys.readouterr()
    assert ET.fromstring(out).tag.endswith("svg")
    assert "hits" in err


def test_size_accepts_a_trace_as_the_load(capsys, tmp_path):
    picture = tmp_path / "hits.svg"
    asked = ["--model", "qwen3-8b", "--gpu", "H100", "--trace", str(TRACE), "--rate", "2", *FEW]
    assert main(["size", *asked, "--chart", "hits", "--svg", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "2,454 requests, without times, 2,987 tokens on average; sized for 2 per second" in shown
    assert "so its requests arrive evenly, 2 a second, in the order of the file" in shown
    assert "hits           92" in shown or "hits           93" in shown
    assert "what hits cost" in picture.read_text()


def test_an_output_path_that_cannot_be_written_is_refused_before_the_work(capsys, monkeypatch):
    monkeypatch.setattr("holdfast.cli.size.answer", None)  # not called
    assert main(["size", *LOAD, "--svg", "/proc/x.svg"]) == USAGE
    assert capsys.readouterr().out == ""


def test_claims_and_models_are_listed(capsys, tmp_path):
    assert main(["size", "--explain"]) == 0
    shown = capsys.readouterr().out
    for verdict in (": exactly, in bf16", "does not reproduce", "holds under its assumption only"):
        assert verdict in shown
    file = tmp_path / "claims.json"
    assert main(["size", "--explain", "wear", "--json", str(file)]) == 0
    assert {row["figure"] for row in json.loads(file.read_text())["rows"]} >= {"drives"}
    assert main(["size", "--models"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 25


BAD = [
    ([], "--model: missing"),
    (["--model", "gpt-9", "--users", "1", "--context", "9"], "model 'gpt-9': not one of the 25"),
    (["--model", "qwen3-8b"], "give --users and --context, or --trace"),
    (["--model", "qwen3-8b", "--users", "1"], "give --users and --context"),
    (["--model", "qwen3-8b", "--trace", "x", "--users", "1"], "--users: a trace contains this"),
    ([*LOAD, "--rate", "3"], "--rate: needs a trace"),
    (["--model", "qwen3-8b", "--users", "0", "--context", "9"], "--users: 0"),
    ([*LOAD, "--gpu", "TPU"], "gpu 'TPU'"),
    ([*LOAD, "--dtype", "fp3"], "dtype 'fp3'"),
    ([*LOAD, "--weights-dtype", "fp3"], "--weights-dtype 'fp3': not known; use one of fp32, bf16"),
    ([*LOAD, "--media", "ddr5,tape"], "medium 'tape'"),
    ([*LOAD, "--prices", "nowhere.yaml"], "nowhere.yaml"),
    ([*LOAD, "--slo-ttft", "0.01"], "not reachable"),
    ([*LOAD, *FEW, "--svg", "/proc/x.svg"], "--svg: cannot write '/proc/x.svg'"),
    ([*LOAD, "--json", "/proc/x.json"], "--json"),
    (["--explain", "nonsense"], "claim 'nonsense'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert main(["size", *arguments]) == USAGE
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_the_weights_dtype_changes_the_bytes_of_the_weights(reported, capsys):
    """405B parameters: 812 GB in bf16, 406 GB in fp8, 209 GB with 4.125 bits each."""
    load = ["--model", "llama-3.1-405b", "--users", "10", "--context", "4000", *FEW]
    found = {}
    for dtype in ("fp8", "int4"):
        status, rows = reported("size", *load, "--gpu", "B200x4", "--weights-dtype", dtype)
        assert status == 0
        found[dtype] = next(row for row in rows if row["what"] == "size.sized")["weights_bytes"]
        assert f"{found[dtype] / 1e9:.0f} GB of weights" in capsys.readouterr().out
    assert found["int4"] / found["fp8"] == pytest.approx(4.125 / 8)
    assert main(["size", *load, "--gpu", "B200x4"]) == USAGE
    assert "the weights of meta-llama/Meta-Llama-3.1-405B take 812 GB" in capsys.readouterr().err


def test_the_kv_dtype_follows_the_config_of_the_model(reported, tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256}
    config |= {"num_attention_heads": 8, "vocab_size": 1000, "intermediate_size": 512}
    scheme = {"num_bits": 8, "type": "float", "dynamic": False}
    config["quantization_config"] = {"quant_method": "fp8", "kv_cache_scheme": scheme}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load = ["--model", str(tmp_path), "--users", "10", "--context", "2000", *FEW]
    for dtype, asked in (("fp8", []), ("bf16", ["--dtype", "bf16"])):
        status, rows = reported("size", *load, *asked)
        assert status == 0
        assert next(row for row in rows if row["what"] == "size.sized")["dtype"] == dtype


def test_prices_of_the_users_own_are_used(capsys, tmp_path):
    prices = tmp_path / "mine.yaml"
    prices.write_text("media: {nvme-tlc: {dollars_per_gb: -1}}")
    assert main(["size", *LOAD, *FEW, "--prices", str(prices)]) == USAGE
    assert "media.nvme-tlc.dollars_per_gb.low: -1" in capsys.readouterr().err
    prices.write_text("media: {ddr5: {dollars_per_gb: 0.001}}")
    assert main(["size", *LOAD, *FEW, "--nodes", "4", "--prices", str(prices)]) == 0
    assert "nvme-tlc" not in capsys.readouterr().out.split("hits", maxsplit=1)[0]
