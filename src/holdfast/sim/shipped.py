"""The traces of the repository by short name; they are not part of the installed package."""

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
"""42 million block accesses."""

_FOLDERS = (Path("traces"), Path(__file__).resolve().parents[3] / "traces")


def find_trace(text: str) -> Path:
    """Return the path that a user's word means: a file, or the name of a shipped trace.

    Raises TraceError if it is neither, or the trace is not here.
    """
    path = Path(text)
    if path.exists() or text not in SHIPPED:
        if path.exists():
            return path
        raise TraceError(
            f"{text}: no such file, nor a shipped trace; those are: {', '.join(SHIPPED)}"
        )
    for folder in _FOLDERS:
        if (folder / SHIPPED[text]).exists():
            return folder / SHIPPED[text]
    raise TraceError(
        f"{text}: traces/{SHIPPED[text]} is not here; the traces come with the repository, not "
        "with the package: give the path of the file"
    )
