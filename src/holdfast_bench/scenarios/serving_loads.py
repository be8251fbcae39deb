"""Loads that a server sees: warm prompts, sessions of several turns, and crowds behind one prefix.

Each load runs on one engine and returns the seconds to the first token of its requests.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast_bench.harness.completion import complete
from holdfast_bench.harness.lifetime import owned
from holdfast_bench.harness.server import HOST, VllmServer

ANSWER_TOKENS = 16

PEER_BENCH_TIMEOUT_S = 600.0
_PEER_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


class Sessions(NamedTuple):
    """A load of sessions: how many, their turns, and new tokens of the user in the first turn.

    `later_tokens`: the same of each later turn.
    """

    number: int = 8
    turns: int = 3
    first_tokens: int = 4000
    later_tokens: int = 250

    @property
    def longest(self) -> int:
        """Tokens of a session at its end, the engine's answers included."""
        return self.first_tokens + (self.turns - 1) * self.later_tokens + self.turns * ANSWER_TOKENS


class SessionTimes(NamedTuple):
    """Seconds to the first token of every first turn, and of all later turns."""

    first: list[float]
    later: list[float]


class ServingPrompts:
    """Random prompts: equal seeds give equal prompts, so that every engine sees the same load."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._source = random.Random(seed)  # noqa: S311  # prompts, not secrets
        self._vocabulary = vocabulary

    def tokens(self, count: int) -> list[int]:
        """Return new random tokens; 0 and 1 are special ones."""
        return [self._source.randrange(2, self._vocabulary) for _ in range(count)]


def run_sessions(
    engine: VllmServer, prompts: ServingPrompts, sessions: Sessions, clients: int
) -> SessionTimes:
    """Serve sessions in turns: each session's first turn, then each one's second, and so on.

    `clients` requests are under way at once. A turn's prompt is the whole conversation before it,
    the engine's answers included, and new tokens of the user.
    """
    conversations: list[list[int]] = [[] for _ in range(sessions.number)]
    times = SessionTimes([], [])

    def take_turn(session: int, new: Sequence[int]) -> float:
        conversation = conversations[session]
        conversation += new
        answer = complete(engine, conversation, ANSWER_TOKENS)
        conversation += answer.tokens
        return answer.ttft_s

    with ThreadPoolExecutor(clients) as pool:
        for turn in range(sessions.turns):
            new_tokens = sessions.later_tokens if turn else sessions.first_tokens
            asked = [prompts.tokens(new_tokens) for _ in conversations]
            seconds = pool.map(take_turn, range(sessions.number), asked)
            (times.later if turn else times.first).extend(seconds)
    return times


def run_crowd(engine: VllmServer, crowd: Sequence[Sequence[int]]) -> list[float]:
    """Send all prompts at once to an engine whose own cache is empty."""
    engine.reset_prefix_cache()
    with ThreadPoolExecutor(len(crowd)) as pool:
        return [answer.ttft_s for answer in pool.map(lambda each: complete(engine, each, 1), crowd)]


class PrefixRepetition(NamedTuple):
    """Options of vLLM's own load generator: prompts that repeat a few prefixes."""

    requests: int = 24
    prefixes: int = 8
    prefix_tokens: int = 2048
    suffix_tokens: int = 128
    output_tokens: int = 16
    concurrency: int = 4

    @property
    def longest(self) -> int:
        """Tokens of a request and its answer."""
        return self.prefix_tokens + self.suffix_tokens + self.output_tokens


class PrefixRepetitionTimes(NamedTuple):
    """Seconds to the first token that vLLM's own load generator measured."""

    mean_s: float
    p90_s: float


def run_prefix_repetition(
    engine: VllmServer, model: Path, folder: Path, load: PrefixRepetition
) -> PrefixRepetitionTimes:
    """Run `vllm bench serve` with `prefix_repetition` against an engine.

    Raises HoldfastError if it fails or a request of it does.
    """
    name = f"{engine.name}.prefix_repetition"
    argv = [
        *("env", "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1"),
        *(sys.executable, "-c", _PEER_BENCH),
        *("--backend", "openai", "--host", HOST, "--port", str(engine.port)),
        *("--model", "model", "--tokenizer", str(model)),
        *("--dataset-name", "prefix_repetition", "--num-prompts", str(load.requests)),
        *("--prefix-repetition-prefix-len", str(load.prefix_tokens)),
        *("--prefix-repetition-suffix-len", str(load.suffix_tokens)),
        *("--prefix-repetition-num-prefixes", str(load.prefixes)),
        *("--prefix-repetition-output-len", str(load.output_tokens)),
        *("--max-concurrency", str(load.concurrency), "--ignore-eos", "--seed", "0"),
        *("--percentile-metrics", "ttft", "--metric-percentiles", "90", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(folder), "--result-filename", f"{name}.json"),
    ]
    try:
        done = subprocess.run(
            owned(argv), capture_output=True, text=True, check=False,
            timeout=PEER_BENCH_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise HoldfastError(
            f"vLLM's load generator did not end within {PEER_BENCH_TIMEOUT_S:.0f} s"
        ) from error
    if done.returncode:
        raise HoldfastError(f"vLLM's load generator failed: {done.stderr.strip()[-500:]}")
    found = json.loads((folder / f"{name}.json").read_text())
    if found["completed"] != load.requests:
        raise HoldfastError(
            f"{engine.name}: {found['completed']} of {load.requests} requests ended"
        )
    return PrefixRepetitionTimes(found["mean_ttft_ms"] / 1e3, found["p90_ttft_ms"] / 1e3)
