"""Render the pages of benchmarks from the reports in docs/benchmarks/.

docs/benchmarks.md answers one question a section with a chart, its table and its command;
docs/benchmarks/rows.md has every row of every report.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
REPORTS = ROOT / "docs" / "benchmarks"

ROWS_PAGE = REPORTS / "rows.md"

INTRO = """\
# Benchmarks

Speeds and times are medians of several rounds, unless [all rows](benchmarks/rows.md) says
otherwise; hit rates are exact. The command beneath each table measures it again. The machines are
shared and noisy: compare the bars of one chart, not seconds between charts. `make bench` measures
all subjects and renders these pages (`make bench BENCH=pool`: one subject); it ends with 1 if a
goal was missed. `.venv/bin/python tools/benchmarks.py` renders them again from
`docs/benchmarks/*.json`. The rows of `holdfast soak` are those of
`holdfast soak --json docs/benchmarks/soak.json`.
"""
NOTES = dict(
    re.findall(
        r"^## (.+)\n\n((?s:.+?))\n*(?=^## |\Z)",
        (ROOT / "tools" / "benchmark_notes.md").read_text(),
        re.MULTILINE,
    )
)
"""What a report does not say of itself, by its name, and of all rows."""

DIGITS = 3
KNOWN = ("what", "value", "unit", "limit", "ratio", "goal", "ok")

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
HOST_TIERS = {
    "warm_s": ("Holdfast", "#1f6feb"),
    "lmcache_s": ("LMCache", "#5b8c5a"),
    "native_s": ("vLLM's own host tier", "#d98324"),
}
"""Fields of the rows `vllm.lmcache.TOKENS` and, from a machine with a GPU, `vllm.native.TOKENS`."""
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


def row(fields: dict[str, object]) -> str:
    """One line of the table; what only this row has goes to its end."""
    more = "; ".join(f"{k} {figure(v)}" for k, v in fields.items() if k not in KNOWN)
    known = [figure(fields.get(name)) for name in KNOWN[1:]]
    return "| " + " | ".join([f"`{fields['what']}`", *known, more]) + " |"


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
    return Chart("seconds to the first token (less is better)", FIRST_TOKEN, groups)


def host_tiers_chart(report: dict[str, Any]) -> Chart:
    """Return seconds to the first token of contexts in host memory, by whose they are."""
    groups: Groups = {}
    for row in report["rows"]:
        other, _, tokens = str(row["what"]).removeprefix("vllm.").partition(".")
        if other in ("lmcache", "native"):
            bars = groups.setdefault(f"{int(tokens):,} tokens", {})
            bars |= {name: row[name] for name in HOST_TIERS if name in row}
    return Chart("seconds to the first token (less is better)", HOST_TIERS, groups)


def layouts_chart(report: dict[str, Any]) -> Chart:
    """Return seconds to the first token of contexts in exact and in portable blocks."""
    groups: Groups = {
        f"{int(row['what'].rpartition('.')[2]):,} tokens": {
            name: row[f"{name}_s"] for name in LAYOUTS
        }
        for row in report["rows"]
        if row["what"].startswith("vllm.portable.")
    }
    return Chart("seconds to the first token (less is better)", LAYOUTS, groups)


def cuts_chart(report: dict[str, Any]) -> Chart:
    """Return seconds to the first token with the plan's cut and with the best of all cuts."""
    groups: Groups = {
        f"{row['source']}, {row['tokens']:,} tokens": {name: row[name] for name in CUTS}
        for row in report["rows"]
        if row["what"] == "plan.cut"
    }
    return Chart("seconds to the first token (less is better)", CUTS, groups)


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
    return Chart("seconds to the first token (less is better)", GPU_FIRST_TOKEN, groups)


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


class Question(NamedTuple):
    """A section of the page: what is asked, of which report, and the answer in words."""

    title: str
    words: str
    report: str
    file: str
    draw: Callable[[dict[str, Any]], Chart]


QUESTIONS = (
    Question(
        "How much sooner is the first token?",
        "A real vLLM on the CPU, a small model, contexts that lie on one tier. Grey is the time "
        "that the same engine takes to compute the context again.",
        "bench plan",
        "first_token.svg",
        first_token_chart,
    ),
    Question(
        "How does it compare with LMCache and vLLM's own host tier?",
        "The same vLLM behind Holdfast and behind LMCache, in turns, with equal threads and the "
        "contexts in host memory. At 8,192 tokens LMCache may have missed in some rounds: the "
        "bench did not count its misses then. vLLM's own host tier has no bars, because its "
        "connectors refuse CPUs; they are added with the first report from a machine with a GPU.",
        "bench vllm",
        "host_tiers.svg",
        host_tiers_chart,
    ),
    Question(
        "What do portable blocks cost an engine?",
        "The same vLLM with `layout: exact` and with `layout: portable`, in turns, with the "
        "contexts in host memory. Outputs are equal bit for bit.",
        "bench vllm",
        "layouts.svg",
        layouts_chart,
    ),
    Question(
        "How fast do blocks move between tiers?",
        "A store over a disk and a second tier: saves, demotions of what the disk evicts, and "
        "promotions of what is fetched. Records are verified. Grey is the slower of source and "
        "target alone, in the same run; the disks are folders of one drive.",
        "bench movement",
        "movement.svg",
        limits_chart,
    ),
    Question(
        "How fast are pages converted?",
        "Between pages of an engine and portable blocks, bytes per second of one thread's "
        "processor time; grey is a plain copy of the same bytes. `vec` and `amx` are the packings "
        "of vLLM on CPUs, `nhd` and `hnd` rows by token and by head. `device` is by the clock, "
        "with two threads, and its grey is the device that copies pages as they are; `busy` is "
        "beside a thread that holds the interpreter.",
        "bench convert",
        "convert.svg",
        limits_chart,
    ),
    Question(
        "What does the lossy codec change?",
        "How much the distribution of the next token changes if the context before it is coded, in "
        "multiples of what computing in fp32 and not in bf16 changes. A coding may be stored if "
        "both figures are at most 2. Holdfast stores int8 only; the others show that the gate "
        "tells them apart. The model and the text are small and in the repository: "
        "`holdfast judge int8 --model tests/data/trained-model --prompts "
        "tests/data/trained-model/held_out.txt --beside`. They rank codings, and say nothing of "
        "a model that serves: judge yours, see [half the bytes](how-to/quantise.md).",
        "judge",
        "judged.svg",
        judged_chart,
    ),
    Question(
        "How good is the plan?",
        "Some leading part of a context is fetched, the rest is computed. The plan's cut beside "
        "the best of all cuts that were tried.",
        "bench plan",
        "cuts.svg",
        cuts_chart,
    ),
    Question(
        "How does a pool compare with Redis, Mooncake Store, LMCache and plain sockets?",
        "One client, one server, 32 blocks a call over loopback TCP. Plain sockets were measured "
        "in turns with Holdfast over TCP; NIXL and the other stores in rounds of their own. A "
        "store without bars was not measured; its row on [all rows](benchmarks/rows.md) says why.",
        "bench pool",
        "pool.svg",
        pool_chart,
    ),
    Question(
        "What does sealing cost?",
        "Blocks of a domain with a key are encrypted with AES-256-GCM before they leave memory. "
        "`link` is a pool behind a link of 10 Gbit/s, as between two hosts.",
        "bench seal",
        "sealing.svg",
        sealing_chart,
    ),
    Question(
        "How far does KV shrink, and how fast?",
        "Keys and values of a small trained model in bf16, without loss. `planes` is the codec of "
        "Holdfast; its encoding includes the proof that every byte comes back. A compressor "
        "without bars was not installed. On larger models expect 1.35 to 1.4 for `planes` and "
        "`zipnn`; [when it is used](explanation/codec.md).",
        "bench codec",
        "codec.svg",
        codec_chart,
    ),
    Question(
        "How near is each path to what the machine can do?",
        "`host.fetch` copies from the arena to an engine's pages. Grey is the plainest code that "
        "moves the same bytes, measured in the same run, in turns; for `host.fetch` it was one "
        "thread, where Holdfast uses two. `busy` is beside a thread that spins; grey is then "
        "Holdfast without that thread, measured just before.",
        "bench tiers",
        "tiers.svg",
        limits_chart,
    ),
    Question(
        "What does a bucket cost beside its own client?",
        "An object tier on SeaweedFS, 8 segments of 64 MiB at a time, sealed before a write, "
        "verified and opened after a read. Grey is obstore alone, which moves the same bytes to "
        "and from the same server; it neither checks nor copies them. Client and server share two "
        "cores.",
        "bench object",
        "object.svg",
        limits_chart,
    ),
    Question(
        "What does a shared folder cost beside plain files?",
        "Segments of 64 MiB written, flushed and renamed, and ranges of 8 MiB read, by 1 and by 4 "
        "threads, through the process that makes all calls on the mount. `tier` also packs, "
        "publishes and verifies records. Grey is the plainest code that does the same in the same "
        "folder. `cached`: from the page cache.",
        "bench files",
        "files.svg",
        limits_chart,
    ),
    Question(
        "What is a context worth that was announced?",
        "A context that only a pool holds, behind a link of limited bandwidth. Announced its "
        "transfer time before, it is in memory when it is used; announced when its request begins "
        "to wait, it comes while the request waits.",
        "bench prestage",
        "prestage.svg",
        prestage_chart,
    ),
    Question(
        "How fast do blocks reach a GPU?",
        "Batches of 1, 8 and 64 blocks between an arena and an engine's pages. Grey is one copy "
        "between page-locked memory and the GPU. The number in a name is that of the blocks; "
        "`busy` is beside a thread that never gives up the interpreter lock, and so is its limit; "
        "`bounce` is without locked memory. These figures are from before engines locked the "
        "memory of their node ([why and how](decisions/0043-engines-lock-chunks-on-grant.md)); "
        "the present device is not measured yet.",
        "bench gpu",
        "gpu.svg",
        gpu_chart,
    ),
    Question(
        "How soon is the first token on a GPU?",
        "Decoders with random weights in the shapes of Llama-3.1-8B and of one of eight ranks of "
        "Llama-3.1-70B. A fetched prompt is all whole blocks but its last token, which is "
        "computed; its logits are those of the computed prompt, bit for bit.",
        "bench gpu",
        "gpu_first_token.svg",
        gpu_first_token_chart,
    ),
    Question(
        "What do loads and saves cost an engine that decodes?",
        "A graph that reads 16 GB of weights a step, alone and beside copies of 64 blocks. `half` "
        "copies for half of the time.",
        "bench gpu",
        "gpu_decode.svg",
        gpu_decode_chart,
    ),
    Question(
        "Which eviction policy hits most?",
        "Public traces replayed through one store. The oracle knows the future. Hints are replayed "
        "for the traces of agents only. Without hints, the cost-aware order equals leaf-first LRU.",
        "bench policies",
        "policies.svg",
        policies_chart,
    ),
)


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


def machine_of(report: dict[str, Any]) -> str:
    """Return where and when a report was measured, in one sentence."""
    machine = report["machine"]
    memory_gib = machine["memory_bytes"] / (1 << 30)
    return (
        f"{machine['date']}, {machine['cores']} cores of {machine['cpu']}, {memory_gib:.0f} GiB, "
        f"Linux {machine['kernel']}, Python {machine['python']}, Holdfast {report['version']}."
    )


def answer(question: Question, report: dict[str, Any]) -> Iterator[str]:
    """Draw the chart of a question; yield the lines of its section, none without a figure."""
    drawn = question.draw(report)
    if not drawn.groups:
        return
    (REPORTS / question.file).write_text(drawn.svg())
    yield f"\n## {question.title}\n"
    yield f"{question.words}\n"
    yield f"![{drawn.title}]({REPORTS.name}/{question.file})\n"
    yield from drawn.table()
    yield f"\n`holdfast {question.report}`; {machine_of(report)}"


def section(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of one report: machine, date, command, rows."""
    yield f"\n## `holdfast {report['name']}`\n"
    yield f"{machine_of(report)}\n"
    if report["name"] in NOTES:
        yield f"{NOTES[report['name']]}\n"
    yield "| " + " | ".join([*KNOWN, "more"]) + " |"
    yield "|---|--:|---|--:|--:|--:|---|---|"
    yield from (row(fields) for fields in report["rows"])


def main() -> None:
    """Write both pages and the charts."""
    reports = [json.loads(path.read_text()) for path in sorted(REPORTS.glob("*.json"))]
    by_name = {report["name"]: report for report in reports}
    answers = [
        line
        for question in QUESTIONS
        if question.report in by_name
        for line in answer(question, by_name[question.report])
    ]
    rows = [line for report in reports for line in section(report)]
    nothing = ["\nNothing is measured yet."]
    PAGE.write_text(INTRO + "\n".join(answers or nothing) + "\n")
    intro = f"# All rows\n\n{NOTES['all rows']}\n"
    ROWS_PAGE.write_text(intro + "\n".join(rows or nothing) + "\n")


if __name__ == "__main__":
    main()
