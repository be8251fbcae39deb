"""Short names of the traces in the repository, which the installed package does not contain."""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import TraceError

SHIPPED = {
    "conversation": "mooncake_conversation_trace.jsonl.gz",
    "synthetic": "mooncake_synthetic_trace.jsonl.gz",
    "claude-code": "agentic_claudecode_dev.jsonl.gz",
    "taubench": "taubench_gpt4o_airline_blk256B.jsonl.gz",
    "lmcache-agent": "lmcache_agent_taubench.jsonl.gz",
    "azure-code": "azure_llm_2023_code.csv.gz",
    "azure-conv": "azure_llm_2023_conv.csv.gz",
}

LONGEST = "claude-code"
"""The trace with the most block accesses: 42 million."""

_FOLDERS = (Path("traces"), Path(__file__).resolve().parents[3] / "traces")


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
    for folder in _FOLDERS:
        if (folder / SHIPPED[text]).exists():
            return folder / SHIPPED[text]
    raise TraceError(
        f"{text}: traces/{SHIPPED[text]} does not exist; the traces are in the repository, not in "
        "the package: give the path of the file"
    )
