"""Render the pages of benchmarks, and the figures of README.md, from docs/benchmarks/*.json.

docs/benchmarks.md answers one question a section with a chart, its table and its command;
docs/benchmarks/rows.md has every row of every report.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmark_charts import (
    Chart,
    codec_chart,
    cuts_chart,
    engines_chart,
    figure,
    first_token_chart,
    gpu_chart,
    gpu_decode_chart,
    gpu_first_token_chart,
    host_tiers_chart,
    judged_chart,
    kinds_chart,
    layouts_chart,
    limits_chart,
    offload_chart,
    policies_chart,
    pool_chart,
    prestage_chart,
    saves_chart,
    sealing_chart,
    serving_chart,
    sglang_chart,
    transformers_chart,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
REPORTS = ROOT / "docs" / "benchmarks"

ROWS_PAGE = REPORTS / "rows.md"
README = ROOT / "README.md"

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


def sections(file: str) -> dict[str, str]:
    """Return the text of each section of a Markdown file beside this one, by its title."""
    text = (ROOT / "tools" / file).read_text()
    return dict(re.findall(r"^## (.+)\n\n((?s:.+?))\n*(?=^## |\Z)", text, re.MULTILINE))


NOTES = sections("benchmark_notes.md")
"""What a report does not say of itself, by its name, and of all rows."""

WORDS = sections("benchmark_questions.md")
"""What a section of the page asks, by its title."""

KNOWN = ("what", "value", "unit", "limit", "ratio", "goal", "ok")


def row(fields: dict[str, object]) -> str:
    """One line of the table; what only this row has goes to its end."""
    more = "; ".join(f"{k} {figure(v)}" for k, v in fields.items() if k not in KNOWN)
    known = [figure(fields.get(name)) for name in KNOWN[1:]]
    return "| " + " | ".join([f"`{fields['what']}`", *known, more]) + " |"


class Question(NamedTuple):
    """A section of the page: what is asked, of which report, and the chart that answers."""

    title: str
    report: str
    file: str
    draw: Callable[[dict[str, Any]], Chart]

    @property
    def words(self) -> str:
        """What is measured, and how the chart is read."""
        return WORDS[self.title]


HOST_TIERS = "How does it compare with LMCache and vLLM's own host tier?"
"""A question of `bench serve`; until that was measured, `bench vllm` answers it in part."""

QUESTIONS = (
    Question(
        "How much sooner is the first token?", "bench plan", "first_token.svg", first_token_chart
    ),
    Question(HOST_TIERS, "bench serve", "host_tiers.svg", host_tiers_chart),
    Question(HOST_TIERS, "bench vllm", "host_tiers.svg", host_tiers_chart),
    Question("How does it compare under load?", "bench serve", "serving.svg", serving_chart),
    Question(
        "How much sooner is it for models with windows or recurrent layers?",
        "bench kinds",
        "kinds.svg",
        kinds_chart,
    ),
    Question("How much does an engine save?", "bench saves", "saves.svg", saves_chart),
    Question("What do portable blocks cost an engine?", "bench vllm", "layouts.svg", layouts_chart),
    Question(
        "Do engines answer alike behind each other's contexts?",
        "bench engines",
        "engines.svg",
        engines_chart,
    ),
    Question(
        "How much sooner is the first token of transformers?",
        "bench transformers",
        "transformers.svg",
        transformers_chart,
    ),
    Question(
        "How does it compare with SGLang's own storage?",
        "bench sglang",
        "sglang.svg",
        sglang_chart,
    ),
    Question(
        "How does it compare with vLLM's own second tier?",
        "bench offload",
        "offload.svg",
        offload_chart,
    ),
    Question(
        "How fast do blocks move between tiers?", "bench movement", "movement.svg", limits_chart
    ),
    Question("How fast are pages converted?", "bench convert", "convert.svg", limits_chart),
    Question("What does the lossy codec change?", "judge", "judged.svg", judged_chart),
    Question("How good is the plan?", "bench plan", "cuts.svg", cuts_chart),
    Question(
        "How does a pool compare with Redis, Mooncake Store, LMCache and plain sockets?",
        "bench pool",
        "pool.svg",
        pool_chart,
    ),
    Question("What does sealing cost?", "bench seal", "sealing.svg", sealing_chart),
    Question("How far does KV shrink, and how fast?", "bench codec", "codec.svg", codec_chart),
    Question(
        "How near is each path to what the machine can do?",
        "bench tiers",
        "tiers.svg",
        limits_chart,
    ),
    Question(
        "What does a bucket cost beside its own client?", "bench object", "object.svg", limits_chart
    ),
    Question(
        "What does a shared folder cost beside plain files?",
        "bench files",
        "files.svg",
        limits_chart,
    ),
    Question(
        "What is a context worth that was announced?",
        "bench prestage",
        "prestage.svg",
        prestage_chart,
    ),
    Question("How fast do blocks reach a GPU?", "bench gpu", "gpu.svg", gpu_chart),
    Question(
        "How soon is the first token on a GPU?",
        "bench gpu",
        "gpu_first_token.svg",
        gpu_first_token_chart,
    ),
    Question(
        "What do loads and saves cost an engine that decodes?",
        "bench gpu",
        "gpu_decode.svg",
        gpu_decode_chart,
    ),
    Question("Which eviction policy hits most?", "bench policies", "policies.svg", policies_chart),
)


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


FIGURES = re.compile(r"(?<=<!-- figures: make bench -->\n).*(?=<!-- end of figures -->)", re.DOTALL)
"""The part of README.md that is made from reports."""

README_TOKENS = 8_192
SOURCES = {"host": "memory", "disk": "disk", "pool": "a pool of other nodes"}
NUMBERS = {1: "one", 2: "two", 4: "four", 8: "eight"}


def readme_figures(reports: dict[str, dict[str, Any]]) -> str:
    """Return the figures of README.md: one sentence, one picture, one table."""
    plan = reports["bench plan"]
    found = {
        row["source"]: row
        for row in plan["rows"]
        if row["what"] == "plan.recompute" and row["tokens"] == README_TOKENS
    }
    *others, last = (f"{found[s]['planned_s']:.2g} s from {words}" for s, words in SOURCES.items())
    cores = plan["machine"]["cores"]
    sentence = (
        f"**The first token of an {README_TOKENS:,}-token context comes after "
        f"{', '.join(others)} and {last}, instead of after {found['host']['recompute_s']:.2g} s "
        f"of prefill** (vLLM on {NUMBERS.get(cores, cores)} CPU cores; "
        "[all benchmarks](docs/benchmarks.md))."
    )
    picture = (
        "![Seconds to the first token: computed again, and fetched by Holdfast]"
        "(docs/benchmarks/first_token.svg)"
    )
    beside = answered(reports)[HOST_TIERS]
    heading, *table = beside.draw(reports[beside.report]).table()
    anchor = re.sub(r"[^a-z0-9 ]", "", HOST_TIERS.lower()).replace(" ", "-")
    label = "seconds to the first token, context in host memory; each engine computes on one core"
    heading = heading.replace("| |", f"| [{label}](docs/benchmarks.md#{anchor}) |", 1)
    return "\n".join([sentence, "", picture, "", heading, *table, ""])


def answered(reports: dict[str, dict[str, Any]]) -> dict[str, Question]:
    """Return the questions of the page that are answered, by title: by the first report of each."""
    found: dict[str, Question] = {}
    for question in QUESTIONS:
        if question.report in reports and question.draw(reports[question.report]).groups:
            found.setdefault(question.title, question)
    return found


def main() -> None:
    """Write both pages, the charts and the figures of README.md."""
    reports = [json.loads(path.read_text()) for path in sorted(REPORTS.glob("*.json"))]
    by_name = {report["name"]: report for report in reports}
    answers = [
        line
        for question in answered(by_name).values()
        for line in answer(question, by_name[question.report])
    ]
    rows = [line for report in reports for line in section(report)]
    nothing = ["\nNothing is measured yet."]
    PAGE.write_text(INTRO + "\n".join(answers or nothing) + "\n")
    intro = f"# All rows\n\n{NOTES['all rows']}\n"
    ROWS_PAGE.write_text(intro + "\n".join(rows or nothing) + "\n")
    README.write_text(FIGURES.sub(lambda _: readme_figures(by_name), README.read_text()))


if __name__ == "__main__":
    main()
