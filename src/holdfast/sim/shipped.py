"""Files that are shipped: data of the package, and traces and ladders by name."""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import ConfigError, TraceError

SHIPPED = {
    "conversation": "mooncake_conversation_trace.jsonl.gz",
    "synthetic": "mooncake_synthetic_trace.jsonl.gz",
    "claude-code": "agentic_claudecode_dev.jsonl.gz",
    "taubench": "taubench_gpt4o_airline_blk256B.jsonl.gz",
    "lmcache-agent": "lmcache_agent_taubench.jsonl.gz",
    "azure-code": "azure_llm_2023_code.csv.gz",
    "azure-conv": "azure_llm_2023_conv.csv.gz",
}

LONGEST_TRACE = "claude-code"
"""The trace with the most block accesses: 42 million."""

DATA = Path(__file__).parent / "data"
"""The package's own data."""

_REPOSITORY = Path(__file__).resolve().parents[3]
_TRACES = (Path("traces"), DATA / "traces", _REPOSITORY / "traces")
_LADDERS = (DATA / "ladders", _REPOSITORY / "examples" / "ladders")


def find_trace(text: str) -> Path:
    """Return the path of a trace, given a path or the name of a shipped trace.

    Raises TraceError if it is neither, or if the shipped trace is not on this machine.
    """
    path = Path(text)
    if path.exists():
        return path
    if text not in SHIPPED:
        raise TraceError(
            f"{text}: neither a file nor a shipped trace; shipped are: {', '.join(SHIPPED)}"
        )
    for folder in _TRACES:
        if (folder / SHIPPED[text]).exists():
            return folder / SHIPPED[text]
    raise TraceError(
        f"{text}: traces/{SHIPPED[text]} does not exist; the package does not contain it, "
        "so clone the repository, or give the path of the file"
    )


def find_ladder(text: str) -> Path:
    """Return the path of a ladder, given a path or the name of a shipped ladder.

    Raises ConfigError if it is neither.
    """
    path = Path(text)
    if path.exists():
        return path
    shipped = {path.stem: path for folder in _LADDERS for path in sorted(folder.glob("*.yaml"))}
    if text not in shipped:
        raise ConfigError(
            f"--ladder: {text}: neither a file nor a shipped ladder; shipped are: "
            f"{', '.join(shipped)}"
        )
    return shipped[text]
