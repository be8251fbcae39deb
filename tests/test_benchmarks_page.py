"""The charts of the page: every store and policy that was measured, and none that was not."""

import importlib.util
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "benchmarks.py"
sys.path.append(str(TOOL.parent))  # it imports its charts from the folder that it is run in


def loaded():
    spec = importlib.util.spec_from_file_location("benchmarks_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def drawn(name, rows):
    return getattr(loaded(), name)({"name": "bench x", "rows": rows}).svg()


def words_of(svg):
    return {text.text for text in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}


def test_the_length_of_a_bar_shows_the_measured_value():
    rows = [
        {"what": "pool.get.2MiBx32", "value": 4.0, "limit": 5.0},
        {"what": "pool.put.2MiBx32", "value": 2.0, "limit": 2.5},
        {"what": "peer.redis.get.2MiBx32", "value": 1.0},
        {"what": "pool.get.2MiBx32.cpu", "value": 1.1, "limit": None},
        {"what": "pool.get.2MiBx32.tls", "value": 9.0, "limit": 9.0},
        {"what": "pool.get.2MiBx32.nixl", "value": 3.0, "limit": 2.9},
        {"what": "peer.lmcache", "value": None},
    ]
    svg = ET.fromstring(drawn("pool_chart", rows))
    words = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"plain sockets", "Holdfast", "Holdfast over NIXL (UCX)", "Redis"} <= set(words)
    assert "LMCache server" not in words
    widths = [float(r.get("width") or 0) for r in svg.iter("{http://www.w3.org/2000/svg}rect")
              if r.get("height") == "11"]  # fmt: skip
    assert max(widths) == 430.0
    assert widths.count(344.0) == 1
    assert widths.count(86.0) == 1


def test_a_bar_has_the_same_figure_as_the_table():
    rows = [
        {"what": "pool.get.2MiBx32", "value": 123.456, "limit": 1234.5},
        {"what": "pool.put.2MiBx32", "value": 0.98765, "limit": None},
    ]
    assert {"123", "1,234", "0.988"} <= words_of(drawn("pool_chart", rows))


def test_a_report_without_rows_gives_an_empty_chart():
    assert "Holdfast" not in drawn("pool_chart", [])


def test_policies_are_drawn_by_trace_and_capacity_beside_the_bound():
    rows = [
        {"what": "agents.12500.belady", "value": 0.635},
        {"what": "agents.12500.leaf_lru", "value": 0.329},
        {"what": "agents.12500.cost_aware.hinted", "value": 0.564},
        {"what": "agents.12500.random", "value": 0.1},
    ]
    words = words_of(drawn("policies_chart", rows))
    assert {"agents, 12,500", "the oracle's bound", "cost-aware, with hints"} <= words
    assert {"0.635", "0.329", "0.564"} <= words
    assert not words & {"LIRS", "0.1"}


def test_each_question_has_its_chart_and_its_table():
    rows = [
        {"what": "plan.recompute", "source": "host", "tokens": 8192, "planned_s": 0.18,
         "recompute_s": 10.1},
        {"what": "plan.recompute", "source": "slow", "tokens": 8192, "planned_s": 8.0,
         "recompute_s": 7.8},
        {"what": "plan.cut", "source": "disk", "tokens": 512, "planned_s": 0.07, "best_s": 0.071},
    ]  # fmt: skip
    tool = loaded()
    report = {"name": "bench plan", "rows": rows}
    table = list(tool.first_token_chart(report).table())
    assert table == [
        "| | computed again | fetched by Holdfast |",
        "|---|--:|--:|",
        "| host, 8,192 tokens | 10.1 | 0.18 |",
    ]
    assert list(tool.cuts_chart(report).table())[2] == "| disk, 512 tokens | 0.071 | 0.07 |"
    rows = [
        {"what": "x.disk.write", "value": 2.0, "unit": "GB/s", "limit": 2.5},
        {"what": "x.seal", "value": 5.0, "unit": "GB/s", "limit": 6.0},
        {"what": "x.core", "value": 5.0, "unit": "GB/s", "limit": None},
        {"what": "x.wait", "value": 5.0, "unit": "ms", "limit": 6.0},
    ]
    report = {"name": "bench x", "rows": rows}
    assert list(tool.limits_chart(report).groups) == ["disk.write", "seal"]
    assert list(tool.sealing_chart(report).groups) == ["disk.write"]


def test_figures_of_a_gpu_are_drawn_by_what_they_answer():
    rows = [
        {"what": "gpu.load.m.8", "value": 40.0, "unit": "GB/s", "limit": 50.0},
        {"what": "gpu.kernel.pack.m", "value": 2000.0, "unit": "GB/s", "limit": 2500.0},
        {"what": "gpu.first_token.m-8b.4096.recomputed", "value": 0.2, "unit": "s"},
        {"what": "gpu.first_token.m-8b.4096.disk.sealed", "value": 0.1, "unit": "s"},
        {"what": "gpu.first_token.m-8b.131072.recomputed", "value": None, "unit": ""},
        {"what": "gpu.decode.load.half", "value": 9.0, "unit": "steps/s", "limit": 10.0},
        {"what": "gpu.decode.alone", "value": 10.0, "unit": "steps/s"},
    ]
    tool, report = loaded(), {"name": "bench gpu", "rows": rows}
    assert list(tool.gpu_chart(report).groups) == ["load.m.8"]
    assert tool.gpu_first_token_chart(report).groups == {
        "m-8b, 4,096": {"recomputed": 0.2, "disk.sealed": 0.1}
    }
    assert tool.gpu_decode_chart(report).groups == {"load.half": {"value": 9.0, "limit": 10.0}}


def test_prestages_are_drawn_by_when_they_were_announced():
    rows = [
        {"what": "prestage.announced.fetch", "value": 40.0, "limit": 38.0, "unit": "ms"},
        {"what": "prestage.queued.gain", "value": 0.9, "pool_s": 1.2, "queued_s": 0.3},
        {"what": "prestage.engine.queued.gain", "value": None},
    ]
    bars = {"pool": 1.2, "queued": 0.3, "announced": 0.04, "host": 0.038}
    chart = loaded().prestage_chart({"name": "bench prestage", "rows": rows})
    assert chart.groups == {"fetch by a node": bars}


def test_a_question_that_no_row_answers_is_left_out():
    tool = loaded()
    question = next(each for each in tool.QUESTIONS if each.file == "gpu_decode.svg")
    assert list(tool.answer(question, {"name": "bench gpu", "rows": []})) == []


def test_the_chart_of_codecs_shows_ratio_and_speeds_of_what_was_measured():
    rows = [
        {"what": "codec.ratio.keys", "value": 1.48},
        {"what": "codec.encode", "value": 1.1, "unit": "GB/s", "limit": 20.0},
        {"what": "codec.decode", "value": 3.2, "unit": "GB/s", "limit": 20.0},
        {"what": "codec.record.encode", "value": 0.9, "unit": "GB/s"},
        {"what": "codec.lz4.ratio", "value": 1.0, "unit": "x"},
        {"what": "codec.lz4.encode", "value": 4.0, "unit": "GB/s"},
        {"what": "codec.zipnn", "value": None, "unit": ""},
        {"what": "codec.auto.disk", "value": 2.0, "unit": "GB/s"},
        {"what": "codec.disk.fetch", "value": 1.4, "unit": "GB/s"},
    ]
    chart = loaded().codec_chart({"name": "bench codec", "rows": rows})
    assert chart.groups == {
        "planes, 1.48x": {"encode": 1.1, "decode": 3.2},
        "lz4, 1.00x": {"encode": 4.0},
    }


def test_the_chart_of_layouts_shows_exact_beside_portable_blocks():
    rows = [
        {"what": "vllm.warm.4096", "value": 20.0},
        {"what": "vllm.portable.4096", "value": 1.1, "exact_s": 0.1, "portable_s": 0.11},
    ]
    chart = loaded().layouts_chart({"name": "bench vllm", "rows": rows})
    assert chart.groups == {"4,096 tokens": {"exact": 0.1, "portable": 0.11}}


def test_the_chart_of_conversion_shows_each_packing_beside_a_copy():
    rows = [
        {"what": "convert.vec.bfloat16.save", "value": 8.0, "unit": "GB/s", "limit": 20.0},
        {"what": "convert.device.load.busy", "value": 4.0, "unit": "GB/s", "limit": 9.0},
    ]
    tool = loaded()
    question = next(each for each in tool.QUESTIONS if each.file == "convert.svg")
    assert question.draw({"name": "bench convert", "rows": rows}).groups == {
        "vec.bfloat16.save": {"value": 8.0, "limit": 20.0},
        "device.load.busy": {"value": 4.0, "limit": 9.0},
    }


def test_figures_in_lists_and_mappings_have_three_digits_too():
    line = loaded().row({"what": "a", "value": 1.23456, "cuts_s": {"0": 0.22289, "1": 0.1}})
    assert line.startswith("| `a` | 1.23 |")
    assert "cuts_s 0: 0.223, 1: 0.1" in line
    assert loaded().figure([1.23456, 2.0]) == "1.23, 2"


def test_the_readme_shows_the_figures_of_the_reports():
    reports = [json.loads(path.read_text()) for path in ROOT.glob("docs/benchmarks/*.json")]
    figures = loaded().readme_figures({report["name"]: report for report in reports})
    assert figures in (ROOT / "README.md").read_text(), "tools/benchmarks.py renders it again"


SECONDS = {"vllm_s": 3.0, "native_s": 0.4, "lmcache_s": 0.3, "holdfast_s": 0.1}


def test_servers_are_drawn_by_load_and_a_server_that_was_not_measured_is_left_out():
    rows = [
        {"what": "serve.warm.4096", "value": 3.0, "best_peer": "lmcache", **SECONDS},
        {"what": "serve.sessions.2.later.p90", "value": 3.0, **SECONDS},
        {"what": "serve.sessions.2.first.mean", "value": 1.0, "vllm_s": 3.0, "holdfast_s": 3.1},
        {"what": "serve.sessions.2.saved", "value": 1.0, "holdfast_bytes": 10},
        {"what": "serve.crowd.16.p99", "value": 0.5, **SECONDS},
        {"what": "serve.lmcache", "value": None},
    ]
    tool, report = loaded(), {"name": "bench serve", "rows": rows}
    assert tool.host_tiers_chart(report).groups == {"4,096 tokens": SECONDS}
    assert tool.serving_chart(report).groups == {
        "turns, 2 at once, p90": SECONDS,
        "first, 2 at once, mean": {"vllm_s": 3.0, "holdfast_s": 3.1},
        "crowd of 16, p99": SECONDS,
    }


def test_a_question_is_answered_by_the_first_of_its_reports():
    tool = loaded()
    vllm = {"what": "vllm.lmcache.4096", "lmcache_s": 0.2, "warm_s": 0.1}
    reports = {"bench vllm": {"name": "bench vllm", "rows": [vllm]}}
    assert tool.answered(reports)[tool.HOST_TIERS].report == "bench vllm"
    serve = {"what": "serve.warm.4096", **SECONDS}
    reports["bench serve"] = {"name": "bench serve", "rows": [serve]}
    assert tool.answered(reports)[tool.HOST_TIERS].report == "bench serve"


def test_every_question_has_words():
    assert all(question.words for question in loaded().QUESTIONS)


def test_pairs_of_engines_are_drawn_with_the_share_of_equal_answers():
    rows = [
        {"what": "engines.vllm.transformers.equal", "value": 99.5, "between_alone": 2e-5},
        {
            "what": "engines.vllm.transformers.log_probability",
            "value": 1e-5,
            "between_alone": 2e-5,
        },
    ]
    chart = loaded().engines_chart({"name": "bench engines", "rows": rows})
    assert chart.groups == {"vllm to transformers, 99.5 %": {"between_alone": 2e-5, "value": 1e-5}}


def test_each_engine_s_own_way_is_drawn_beside_holdfast():
    sglang = [{"what": "sglang.beside_file.4096", "cold_s": 3.0, "file_s": 0.2, "warm_s": 0.1}]
    prompts = [{"what": "transformers.full.warm.4096", "computed_s": 3.0, "fetched_s": 0.1}]
    rows = [{"what": "offload.load.host", "ours_s": 0.1, "fs_s": 0.2}]
    tool = loaded()
    drawn = {
        "sglang": tool.sglang_chart({"name": "bench sglang", "rows": sglang}).groups,
        "transformers": tool.transformers_chart({"name": "", "rows": prompts}).groups,
        "offload": tool.offload_chart({"name": "bench offload", "rows": rows}).groups,
    }
    assert drawn == {
        "sglang": {"4,096 tokens": {"cold_s": 3.0, "file_s": 0.2, "warm_s": 0.1}},
        "transformers": {"full, 4,096 tokens": {"computed_s": 3.0, "fetched_s": 0.1}},
        "offload": {"load.host": {"fs_s": 0.2, "ours_s": 0.1}},
    }
