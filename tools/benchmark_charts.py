"""The charts of the page of benchmarks: bars, and the table behind them, from one report."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias
from xml.sax.saxutils import escape

DIGITS = 3

POOL_SIZES = ("64KiBx32", "512KiBx32", "2MiBx32", "8MiBx32")
POOL_STORES = {
    "plain": ("plain sockets", "#9aa5b1"),
    "pool": ("Holdfast", "#1f6feb"),
    "nixl": ("Holdfast over NIXL (UCX)", "#7fb0f5"),
    "peer.mooncake": ("Mooncake Store, TCP", "#d98324"),
    "peer.redis": ("Redis", "#b3423a"),
    "peer.lmcache": ("LMCache server", "#5b8c5a"),
}
POLICIES = {
    "belady": ("the oracle's bound", "#9aa5b1"),
    "cost_aware.hinted": ("cost-aware, with hints", "#1f6feb"),
    "cost_aware": ("cost-aware", "#7fb0f5"),
    "leaf_lru": ("leaf-first LRU", "#5b8c5a"),
    "s3fifo": ("S3-FIFO", "#d98324"),
    "lirs": ("LIRS", "#b3423a"),
}
FIRST_TOKEN = {
    "recompute_s": ("computed again", "#9aa5b1"),
    "planned_s": ("fetched by Holdfast", "#1f6feb"),
}
SERVERS = {
    "vllm_s": ("vLLM alone", "#9aa5b1"),
    "native_s": ("vLLM's own host tier", "#d98324"),
    "lmcache_s": ("LMCache", "#5b8c5a"),
    "holdfast_s": ("Holdfast", "#1f6feb"),
}
STORAGES = {
    "cold_s": ("computed", "#9aa5b1"),
    "file_s": ("from SGLang's storage `file`", "#d98324"),
    "warm_s": ("from Holdfast", "#1f6feb"),
}
PROMPTS = {
    "computed_s": ("computed, without a store", "#9aa5b1"),
    "missed_s": ("missed in a store", "#d98324"),
    "fetched_s": ("fetched", "#1f6feb"),
}
SECOND_TIERS = {
    "fs_s": ("vLLM's tier `fs`", "#9aa5b1"),
    "ours_s": ("Holdfast", "#1f6feb"),
}
ANSWERS = {
    "between_alone": ("between the two engines alone", "#9aa5b1"),
    "value": ("behind the other engine's context", "#1f6feb"),
}
KINDS = {
    "cold_s": ("computed", "#9aa5b1"),
    "warm_s": ("fetched from memory", "#1f6feb"),
}
SAVES = {
    "when_full": ("save: when_full", "#9aa5b1"),
    "before_eviction": ("save: before_eviction", "#1f6feb"),
    "auto": ("save: auto", "#7fb0f5"),
}
LAYOUTS = {
    "exact": ("exact blocks", "#9aa5b1"),
    "portable": ("portable blocks", "#1f6feb"),
}
CUTS = {
    "best_s": ("the best of all cuts", "#9aa5b1"),
    "planned_s": ("the plan's cut", "#1f6feb"),
}
LIMITS = {
    "limit": ("limit (see text)", "#9aa5b1"),
    "value": ("Holdfast", "#1f6feb"),
}
GPU_FIRST_TOKEN = {
    "recomputed": ("computed again", "#9aa5b1"),
    "host": ("from host memory", "#1f6feb"),
    "disk": ("from disk", "#7fb0f5"),
    "disk.sealed": ("from a sealed disk", "#d98324"),
}
GPU_DECODE = {
    "limit": ("decoding alone", "#9aa5b1"),
    "value": ("beside copies", "#1f6feb"),
}
CODECS = {
    "encode": ("encode, a core", "#5b8c5a"),
    "decode": ("decode, a core", "#1f6feb"),
}
JUDGED = {
    "kl": ("mean", "#1f6feb"),
    "kl_p99": ("99th percentile", "#7fb0f5"),
}
PRESTAGES = {
    "pool": ("from the pool, not announced", "#9aa5b1"),
    "queued": ("announced when the wait of 1 s began", "#7fb0f5"),
    "announced": ("announced in time", "#1f6feb"),
    "host": ("from memory", "#5b8c5a"),
}
SEALING = {
    "limit": ("without sealing", "#9aa5b1"),
    "value": ("sealed", "#1f6feb"),
}
TOKENS_SHOWN = (1_024, 4_096, 8_192)
SECONDS = "seconds to the first token (less is better)"
BAR, GAP, LEFT, WIDTH = 13, 18, 150, 430


def figure(value: object) -> str:
    """Three significant digits for numbers, those in lists and mappings too; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10**DIGITS else f"{value:.{DIGITS}g}"
    if isinstance(value, list):
        return ", ".join(map(figure, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}: {figure(each)}" for name, each in value.items())
    return str(value)


Series: TypeAlias = dict[str, tuple[str, str]]
"""What bars stand for: words and a colour by name."""

Groups: TypeAlias = dict[str, dict[str, float]]
"""Figures by the group of bars they stand in, and by series."""


class Chart(NamedTuple):
    """Bars: what they show, with the unit, the series and the groups they stand in."""

    title: str
    series: Series
    groups: Groups

    def svg(self) -> str:
        """Return the picture; series and bars without a figure are left out."""
        series = {
            name: shown
            for name, shown in self.series.items()
            if any(name in bars for bars in self.groups.values())
        }
        top = 30 + 16 * len(series)
        lines = [*_legend(series), *_bars(series, self.groups, top)]
        wide = LEFT + WIDTH + 50
        high = top + sum(BAR * len(bars) + GAP for bars in self.groups.values())
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
        head += f'width="{wide}" height="{high}" font-family="sans-serif" font-size="11">'
        back = '<rect width="100%" height="100%" fill="white"/>'
        title = f'<text x="10" y="12">{escape(self.title)}</text>'
        return "\n".join([head, back, title, *lines, "</svg>", ""])

    def table(self) -> Iterator[str]:
        """Yield the lines of the table behind the picture; series without a figure are left out."""
        shown = [name for name in self.series if any(name in bars for bars in self.groups.values())]
        yield "| | " + " | ".join(self.series[name][0] for name in shown) + " |"
        yield "|---" + "|--:" * len(shown) + "|"
        for label, bars in self.groups.items():
            yield f"| {label} | " + " | ".join(figure(bars.get(name)) for name in shown) + " |"


def first_token_chart(report: dict[str, Any]) -> Chart:
    """Return seconds to the first token, computed again and fetched, by tier and length."""
    groups: Groups = {
        f"{row['source']}, {row['tokens']:,} tokens": {name: row[name] for name in FIRST_TOKEN}
        for row in report["rows"]
        if row["what"] == "plan.recompute"
        and row["source"] in ("host", "disk", "pool")
        and row["tokens"] in TOKENS_SHOWN
    }
    return Chart(SECONDS, FIRST_TOKEN, groups)


def host_tiers_chart(report: dict[str, Any]) -> Chart:
    """Return seconds to the first token of contexts in host memory, by whose they are.

    The rows are those of `bench serve`, or of `bench vllm`.
    """
    groups: Groups = {}
    for row in report["rows"]:
        found = re.fullmatch(r"(serve\.warm|vllm\.lmcache)\.(\d+)", row["what"])
        if found:
            fields = row if found[1] == "serve.warm" else row | {"holdfast_s": row["warm_s"]}
            groups[f"{int(found[2]):,} tokens"] = bars_of(fields, SERVERS)
    return Chart(SECONDS, SERVERS, groups)


LOADS = (
    (r"serve\.sessions\.(\d+)\.later\.(p\d+)", "turns, {0} at once, {1}"),
    (r"serve\.sessions\.(\d+)\.first\.(mean)", "first, {0} at once, {1}"),
    (r"serve\.prefix_repetition\.(\w+)", "repeated prefixes, {0}"),
    (r"serve\.crowd\.(\d+)\.(p\d+)", "crowd of {0}, {1}"),
)
"""Rows of `bench serve` that a chart shows, and the words for each."""


def serving_chart(report: dict[str, Any]) -> Chart:
    """Return seconds to the first token under load, by load and server."""
    groups: Groups = {}
    for pattern, words in LOADS:
        groups |= labelled(report, pattern, words, SERVERS)
    return Chart(SECONDS, SERVERS, groups)


def bars_of(row: dict[str, Any], series: Series) -> dict[str, float]:
    """Return the fields of a row that are among a chart's series."""
    return {name: row[name] for name in series if row.get(name) is not None}


def labelled(report: dict[str, Any], pattern: str, words: str, series: Series) -> Groups:
    """Return the bars of the rows whose names match a pattern; its groups fill the label."""
    return {
        words.format(*map(_with_commas, found.groups())): bars_of(row, series)
        for row in report["rows"]
        if (found := re.fullmatch(pattern, row["what"]))
    }


def _with_commas(part: str) -> str:
    """Return a part of a row's name as a label shows it: numbers with commas."""
    return f"{int(part):,}" if part.isdigit() else part


def sglang_chart(report: dict[str, Any]) -> Chart:
    """Return seconds to SGLang's first token, computed and from each storage."""
    groups = labelled(report, r"sglang\.beside_file\.(\d+)", "{0} tokens", STORAGES)
    return Chart(SECONDS, STORAGES, groups)


def transformers_chart(report: dict[str, Any]) -> Chart:
    """Return seconds to the first token of transformers by kind of model."""
    groups = labelled(report, r"transformers\.(\w+)\.warm\.(\d+)", "{0}, {1} tokens", PROMPTS)
    return Chart(SECONDS, PROMPTS, groups)


def offload_chart(report: dict[str, Any]) -> Chart:
    """Return seconds of saves and loads of vLLM's own offloading, by its secondary tier."""
    groups = labelled(report, r"offload\.(save|load\.\w+)", "{0}", SECOND_TIERS)
    return Chart("seconds (less is better)", SECOND_TIERS, groups)


def engines_chart(report: dict[str, Any]) -> Chart:
    """Return differences of log-probabilities for each engine behind another, with equal answers.

    The label has the share of answers whose tokens are all equal.
    """
    pairs = r"engines\.(\w+)\.(\w+)\.{}"
    equal = {
        found.groups(): row["value"]
        for row in report["rows"]
        if (found := re.fullmatch(pairs.format("equal"), row["what"]))
    }
    groups: Groups = {
        f"{found[1]} to {found[2]}, {figure(equal[found.groups()])} %": bars_of(row, ANSWERS)
        for row in report["rows"]
        if (found := re.fullmatch(pairs.format("log_probability"), row["what"]))
    }
    title = "largest difference of log-probabilities (less is better)"
    return Chart(title, ANSWERS, groups)


def kinds_chart(report: dict[str, Any]) -> Chart:
    """Return seconds to the first token, computed and fetched, by the kind of a model's layers."""
    groups: Groups = {
        f"like {row['like']}": {name: row[name] for name in KINDS}
        for row in report["rows"]
        if ".warm." in row["what"]
    }
    return Chart(SECONDS, KINDS, groups)


def saves_chart(report: dict[str, Any]) -> Chart:
    """Return megabytes that an engine saves, by its option `save`."""
    groups: Groups = {
        f"{row['sessions']} sessions, {row['cached_sessions']} in the engine's cache": {
            name: row[f"{name}_bytes"] / 1e6 for name in SAVES
        }
        for row in report["rows"]
        if row["what"] == "saves.bytes"
    }
    return Chart("MB saved (less is better)", SAVES, groups)


def layouts_chart(report: dict[str, Any]) -> Chart:
    """Return seconds to the first token of contexts in exact and in portable blocks."""
    groups: Groups = {
        f"{int(row['what'].rpartition('.')[2]):,} tokens": {
            name: row[f"{name}_s"] for name in LAYOUTS
        }
        for row in report["rows"]
        if row["what"].startswith("vllm.portable.")
    }
    return Chart(SECONDS, LAYOUTS, groups)


def cuts_chart(report: dict[str, Any]) -> Chart:
    """Return seconds to the first token with the plan's cut and with the best of all cuts."""
    groups: Groups = {
        f"{row['source']}, {row['tokens']:,} tokens": {name: row[name] for name in CUTS}
        for row in report["rows"]
        if row["what"] == "plan.cut"
    }
    return Chart(SECONDS, CUTS, groups)


def limits_chart(report: dict[str, Any]) -> Chart:
    """Return GB/s of each path beside its limit, measured in the same run."""
    return Chart("GB/s (more is better)", LIMITS, limited(report))


def gpu_chart(report: dict[str, Any]) -> Chart:
    """Return GB/s of loads and saves on a GPU beside one page-locked copy."""
    groups = limited(report)
    copies = {name: bars for name, bars in groups.items() if name.startswith(("load.", "save."))}
    return Chart("GB/s (more is better)", LIMITS, copies)


def gpu_first_token_chart(report: dict[str, Any]) -> Chart:
    """Return seconds to the first token on a GPU, by model, length and source."""
    groups: Groups = {}
    for row in report["rows"]:
        found = re.fullmatch(r"gpu\.first_token\.(.+)\.(\d+)\.([a-z.]+)", row["what"])
        if found and row["value"] is not None and found[3] in GPU_FIRST_TOKEN:
            groups.setdefault(f"{found[1]}, {int(found[2]):,}", {})[found[3]] = row["value"]
    return Chart(SECONDS, GPU_FIRST_TOKEN, groups)


def gpu_decode_chart(report: dict[str, Any]) -> Chart:
    """Return decoding steps a second on a GPU, alone and beside copies."""
    groups: Groups = {
        row["what"].removeprefix("gpu.decode."): {name: row[name] for name in GPU_DECODE}
        for row in report["rows"]
        if row["what"].startswith("gpu.decode.") and row["unit"] == "steps/s" and row.get("limit")
    }
    return Chart("steps a second (more is better)", GPU_DECODE, groups)


def sealing_chart(report: dict[str, Any]) -> Chart:
    """Return GB/s of disk and pool, sealed and not."""
    groups = {label: bars for label, bars in limited(report).items() if label.count(".")}
    return Chart("GB/s (more is better)", SEALING, groups)


def codec_chart(report: dict[str, Any]) -> Chart:
    """Return GB/s of a core by compressor, with its ratio in the label."""
    values = {row["what"]: row["value"] for row in report["rows"] if row["value"] is not None}
    ratios = {"planes": values.get("codec.ratio.keys")}
    speeds: Groups = {"planes": {}}
    for what, value in values.items():
        parts = what.split(".")[1:]
        name, kind = (parts[0], parts[1]) if len(parts) > 1 else ("planes", parts[0])
        if kind in CODECS and name != "record":
            speeds.setdefault(name, {})[kind] = value
        elif kind == "ratio" and len(parts) > 1:
            ratios[name] = value
    groups = {
        f"{name}, {ratios[name]:.2f}x": bars
        for name, bars in speeds.items()
        if bars and ratios.get(name) is not None
    }
    return Chart("GB/s of bf16 on one core (more is better)", CODECS, groups)


def judged_chart(report: dict[str, Any]) -> Chart:
    """Return the divergence of each coding, in multiples of the control's."""
    groups: Groups = {}
    for row in report["rows"]:
        coding, _, what = row["what"].rpartition(".")
        if what in JUDGED and row.get("ratio") is not None:
            groups.setdefault(coding, {})[what] = row["ratio"]
    return Chart("divergence, in multiples of the control's (2 passes)", JUDGED, groups)


def prestage_chart(report: dict[str, Any]) -> Chart:
    """Return the seconds of fetches and of first tokens, by when the context was announced."""
    rows, groups = {row["what"]: row for row in report["rows"]}, Groups()
    for what, announced, label in (
        ("prestage", "prestage.announced.fetch", "fetch by a node"),
        ("prestage.engine", "prestage.engine.announced", "first token of vLLM"),
    ):
        gain, fetch = rows.get(f"{what}.queued.gain"), rows.get(announced)
        if gain and fetch and gain["value"] is not None:
            seconds = {"pool": gain["pool_s"], "queued": gain["queued_s"]}
            bars = {"announced": fetch["value"] / 1e3, "host": fetch["limit"] / 1e3}
            groups[label] = seconds | bars
    return Chart("seconds (less is better)", PRESTAGES, groups)


def limited(report: dict[str, Any]) -> Groups:
    """Return the rows in GB/s that have a limit, by their name without the report's."""
    subject = report["name"].rpartition(" ")[2]
    return {
        row["what"].removeprefix(f"{subject}."): {"value": row["value"], "limit": row["limit"]}
        for row in report["rows"]
        if row["unit"] == "GB/s" and row.get("limit") is not None
    }


def pool_chart(report: dict[str, Any]) -> Chart:
    """Return GB/s, 32 blocks a call; stores that were not measured are left out."""
    groups: Groups = {
        f"{verb}, 32 x {size[:-3]}": {} for verb in ("get", "put") for size in POOL_SIZES
    }
    for row in report["rows"]:
        what = re.sub(r"^pool\.(.*)\.nixl$", r"nixl.\1", row["what"])
        way, _, size = what.rpartition(".")
        store, _, verb = way.rpartition(".")
        if size in POOL_SIZES and store in POOL_STORES:
            bars = groups[f"{verb}, 32 x {size[:-3]}"]
            bars[store] = row["value"]
            if store == "pool" and row.get("limit") is not None:
                bars["plain"] = row["limit"]
    return Chart("GB/s over loopback TCP, one client (more is better)", POOL_STORES, groups)


def policies_chart(report: dict[str, Any]) -> Chart:
    """Return token hits by policy, for each trace and size of the store."""
    groups: Groups = {}
    for row in report["rows"]:
        trace, blocks, policy = str(row["what"]).split(".", 2)
        if policy in POLICIES:
            groups.setdefault(f"{trace}, {int(blocks):,}", {})[policy] = row["value"]
    title = "share of input tokens hit, by trace and blocks of the store (more is better)"
    return Chart(title, POLICIES, groups)


def _legend(series: Series) -> Iterator[str]:
    for number, (words, colour) in enumerate(series.values()):
        y = 18 + 16 * number
        yield f'<rect x="{LEFT}" y="{y}" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{LEFT + 16}" y="{y + 9}">{escape(words)}</text>'


def _bars(series: Series, groups: Groups, y: int) -> Iterator[str]:
    most = max((value for bars in groups.values() for value in bars.values()), default=1.0)
    for label, bars in groups.items():
        yield f'<text x="10" y="{y + BAR}">{escape(label)}</text>'
        for name in (name for name in series if name in bars):
            wide = f"{WIDTH * bars[name] / most:.1f}"
            at = f'x="{LEFT}" y="{y}" width="{wide}" height="{BAR - 2}"'
            yield f'<rect {at} fill="{series[name][1]}"/>'
            at = f'x="{LEFT + 5 + float(wide):.1f}" y="{y + BAR - 3}"'
            yield f"<text {at}>{figure(bars[name])}</text>"
            y += BAR
        y += GAP
