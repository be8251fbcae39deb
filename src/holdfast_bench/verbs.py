"""The commands that this package adds to `holdfast`; they start processes and write files."""

from holdfast.cli import Verb

VERBS = {
    name: Verb(f"holdfast_bench.cli.{name}", about, example, starts_processes=True)
    for name, about, example in (
        ("demo", "show a real engine getting its context back (needs vLLM)", "--pool 3"),
        (
            "soak",
            "damage, crash, forge and fuzz a store; count what is ever served wrong",
            "crash --minutes 10",
        ),
        (
            "bench",
            "measure this machine, and Holdfast as a share of what it can do",
            "tiers --json tiers.json",
        ),
        (
            "judge",
            "judge a lossy codec by a model and your prompts, and record the result",
            "int8 --model /models/llama-3.1-8b --prompts prompts.jsonl",
        ),
    )
}
