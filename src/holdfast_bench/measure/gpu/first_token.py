"""Phase 7: the first token of long prompts: recomputed, fetched from host memory, from disk.

The decoders have random weights in the shapes of Llama-3.1-8B and of one of the eight ranks of
Llama-3.1-70B, without its messages between ranks. A fetched prompt is all whole blocks but its last
token, which is computed. After each fetch the logits must be those of the engine's own pages, bit
for bit. Blocks from disk are verified; those of a sealed domain are also decrypted. Their node has
just started, so its memory is new, and not locked before the fetch.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch

from holdfast.codec.seal import missing
from holdfast.errors import HoldfastError
from holdfast.limits import GIB, MIB
from holdfast.report import Row, not_measured
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.measure.gpu.accelerator import HostAccelerator, Tensor
from holdfast_bench.measure.gpu.decoder import Decoder
from holdfast_bench.measure.gpu.paged_engine import PagedEngine
from holdfast_bench.measure.gpu.setting import Setting
from holdfast_bench.measure.gpu.shapes import BLOCK_TOKENS, DECODERS, TOY_DECODER, DecoderShape

LENGTHS = ((4_096, 32_768), (131_072,))
"""Tokens of the prompts: those of all models in the first group come before the second group."""

TOY_LENGTHS = ((128, 256),)
ROUNDS = 3
LONG_TOKENS = 65_536
"""Prompts from this length on are measured once: they take seconds."""

TOKENS_PER_S = 5_000
"""Least tokens a second of all the work for a prompt; it is left out without that time left."""

WARM_TOKENS = 2_048
"""Tokens that are computed before, so that kernels are chosen and loaded."""

LOCK_S = 6.0
"""Longest wait until the memory of the saved blocks is locked; 16 GiB take about 3 s."""

SPARE_BYTES = GIB
TOY_SPARE_BYTES = 64 * MIB


class _Prompt(NamedTuple):
    """The longest prompt, its length in tokens for each row, and the logits of each last token."""

    tokens: Tensor
    lengths: Sequence[int]
    last: Mapping[int, Tensor]


def rows(setting: Setting) -> Iterator[Row]:
    """Yield the times of each model, length and source; what has no time left is a row without."""
    shapes = (TOY_DECODER,) if setting.rehearse else DECODERS
    for lengths in TOY_LENGTHS if setting.rehearse else LENGTHS:
        for shape in shapes:
            if setting.left_s() < lengths[-1] / TOKENS_PER_S:
                for length in lengths:
                    yield not_measured(_name(shape, length, "recomputed"), "no time was left")
                continue
            yield from _model_rows(setting, shape, lengths)


def _model_rows(setting: Setting, shape: DecoderShape, lengths: Sequence[int]) -> Iterator[Row]:
    """Yield the rows of one model: prompts recomputed, and fetched with their gain."""
    decoder = Decoder(shape, lengths[-1] // BLOCK_TOKENS + 1, setting.gpu.kind)
    prompt = _Prompt(decoder.tokens(lengths[-1] + 1), lengths, {})
    decoder.logits(prompt.tokens[:WARM_TOKENS])
    recomputed_s = dict[int, float]()
    for length in lengths:
        whole = prompt.tokens[: length + 1]
        times = [
            setting.gpu.seconds(lambda whole=whole: decoder.logits(whole))  # type: ignore[misc]
            for _ in range(_rounds(length))
        ]
        recomputed_s[length] = statistics.median(times)
        yield Row(_name(shape, length, "recomputed"), recomputed_s[length], "s")
    for row in _fetched_rows(setting, decoder, prompt):
        took_s = recomputed_s[int(str(row.more["tokens"]))]
        gain = took_s / row.value if row.value else None
        yield Row(row.what, row.value, row.unit, {**row.more, "gain": gain})


def _name(shape: DecoderShape, length: int, source: str) -> str:
    return f"gpu.first_token.{shape.model}.{length}.{source}"


def _rounds(length: int) -> int:
    return 1 if length >= LONG_TOKENS else ROUNDS


def _fetched_rows(setting: Setting, decoder: Decoder, prompt: _Prompt) -> Iterator[Row]:
    """Save the prompt on nodes; yield a row for each source and length.

    The pages hold the whole prompt, and do so again after the last fetch from each node.
    """
    last = {length: decoder.logits(*_last(prompt, length)) for length in prompt.lengths}
    prompt = prompt._replace(last=last)
    sealing: list[tuple[str, bool]] = [("disk", False)]
    if not missing():
        sealing.append(("disk.sealed", True))
    for source, seal in sealing:
        for row in _on_node(setting, decoder, prompt, (source, seal)):
            yield row
            if setting.left_s() < 0:
                return


def _on_node(
    setting: Setting, decoder: Decoder, prompt: _Prompt, kind: tuple[str, bool]
) -> Iterator[Row]:
    """Save the prompt on a node, and time fetches from its memory and from its disk.

    `kind`: the source's name and whether the domain is sealed. The node is restarted before each
    fetch from disk, so that its memory is empty.
    """
    source, seal = kind
    shape, gpu = decoder.shape.pages, setting.gpu
    blocks = prompt.lengths[-1] // BLOCK_TOKENS
    spare = TOY_SPARE_BYTES if setting.rehearse else SPARE_BYTES
    room = int(1.2 * blocks * shape.block_bytes) + spare
    with (
        tempfile.TemporaryDirectory(dir=setting.folder) as scratch,
        NodeUnderTest(
            folder := Path(scratch), room, room, settings=_settings(folder, seal=seal)
        ) as node,
    ):
        with closing(PagedEngine(node.address, gpu, shape, decoder.pages)) as engine:
            saved = engine.save(engine.chain(prompt.tokens.tolist()))
            if saved != blocks:
                raise HoldfastError(f"{saved} of {blocks} blocks saved")
            locked = engine.await_locks(blocks * shape.block_bytes, LOCK_S) if not seal else 0
            for length in prompt.lengths if not seal else []:
                rounds = _rounds(length)
                timed = [_timed(gpu, (decoder, engine), prompt, length) for _ in range(rounds)]
                yield _row(decoder, length, "host", timed, locked)
        node.wait_on_disk(blocks, max(1.0, setting.left_s()))
        for length in prompt.lengths:
            if setting.left_s() < 0:
                return
            node.restart()
            node.wait_recovered()
            with closing(PagedEngine(node.address, gpu, shape, decoder.pages)) as engine:
                timed = [_timed(gpu, (decoder, engine), prompt, length)]
                yield _row(decoder, length, source, timed)


class _FirstToken(NamedTuple):
    """One fetch with its first token: the time, and the tiers that the blocks came from."""

    seconds: float
    tiers: set[str]


def _timed(
    gpu: HostAccelerator,
    sides: tuple[Decoder, PagedEngine],
    prompt: _Prompt,
    length: int,
) -> _FirstToken:
    """Fetch a prompt and compute its last token; raise HoldfastError for other logits."""
    decoder, engine = sides
    keys = engine.chain(prompt.tokens[:length].tolist()).keys
    decoder.clear()
    tiers = set[str]()

    def first_token() -> Tensor:
        tiers.update(engine.fetch(keys))
        return decoder.logits(*_last(prompt, length))

    logits: list[Tensor] = []
    seconds = gpu.seconds(lambda: logits.append(first_token()))
    if not torch.equal(logits[0], prompt.last[length]):
        raise HoldfastError(f"{length} fetched tokens gave other logits than computed ones")
    return _FirstToken(seconds, tiers)


def _row(
    decoder: Decoder, length: int, source: str, timed: Sequence[_FirstToken], locked: int = 0
) -> Row:
    """Return the row of some fetches; raise HoldfastError if their blocks came from elsewhere."""
    tiers = set[str]().union(*(each.tiers for each in timed))
    if tiers != {source.partition(".")[0]}:
        raise HoldfastError(f"blocks from {', '.join(tiers)}, not from {source}")
    more: dict[str, object] = {"tokens": length, "source": source, "locked_gib": locked / GIB}
    median_s = statistics.median(each.seconds for each in timed)
    return Row(_name(decoder.shape, length, source), median_s, "s", more)


def _settings(folder: Path, *, seal: bool) -> dict[str, object]:
    """Return a node's settings: one domain, sealed or not."""
    key = folder / "domain.key"
    key.write_text("5a" * 32)
    key.chmod(0o600)
    return {"domains": {"default": {"key_file": str(key), "seal": seal}}}


def _last(prompt: _Prompt, length: int) -> tuple[Tensor, int]:
    """Return the last token of a prompt and its position."""
    return prompt.tokens[length : length + 1], length
