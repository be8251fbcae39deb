"""The commands that this package adds to `holdfast`; they start processes and write files."""

from holdfast.cli import Verb

VERBS = {
    name: Verb(f"holdfast_bench.cli.{name}", about, starts_processes=True)
    for name, about in {
        "demo": "show a real engine getting its context back (needs vLLM)",
        "soak": "damage, crash, forge and fuzz a store; count what is ever served wrong",
        "bench": "measure this machine, and Holdfast as a share of what it can do",
    }.items()
}
