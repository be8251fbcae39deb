"""Which models are cached, by engine: the table for the connector, the commands and the pages.

A model's kind follows from its layers. The connector finds them in vLLM's KV cache specifications,
`holdfast doctor`, `size` and `sim` in the model's config.json; both ask `kind_of`.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Literal, NamedTuple

Mechanism = Literal["full", "window", "chunk", "recurrent", "sparse", "other"]
"""What a layer keeps of a context; latent attention (MLA) keeps all of it, so it counts as full."""


class Caching(StrEnum):
    """Whether the connector caches a kind of model."""

    YES = "yes"
    NOT_YET = "not yet"


class LayerKind(NamedTuple):
    """What one layer keeps, and its size per token in any unit that all layers share."""

    mechanism: Mechanism
    size: float


YES, NOT_RUN = "yes", "not run"
"""Whether tests run a real engine with a kind of model, and get its contexts back."""

_SGLANG_POOLS = "not run; its pools are tested with stubs"


class ModelKind(NamedTuple):
    """A row of the table: models whose layers keep the same, and whether they are cached.

    `layers`: the kind in words. `models`: examples. `why`: the reason, a clause. `since`: the first
    version that caches it; empty if none does. `portable`: whether its blocks may be portable, so
    that engines of another tensor-parallel size read them. These four are about vLLM.
    `not_in_transformers`: why `holdfast.transformers` does not cache it; empty if it does.
    `offloading`, `sglang`,
    `lmcache`: the same of the bindings that need to know nothing of a model's layers: `YES` if a
    real engine was run with such a model, else what is known.
    """

    layers: str
    models: tuple[str, ...]
    caching: Caching
    why: str
    since: str = ""
    portable: str = YES
    not_in_transformers: str = ""
    offloading: str = NOT_RUN
    sglang: str = NOT_RUN
    lmcache: str = NOT_RUN


FULL = ModelKind(
    "full or latent (MLA) attention in every layer",
    ("Llama 3", "Qwen3", "Mixtral", "MiniMax-M2", "DeepSeek-V3", "Kimi-K2"),
    Caching.YES,
    "a page depends only on the tokens up to its end",
    "0.1.0",
    portable="yes; latents on CPUs without AMX only",
    offloading=YES,
    sglang=YES,
    lmcache=YES,
)
WINDOWS = ModelKind(
    "sliding windows in some layers, full attention in the others",
    ("Gemma 2", "Gemma 3", "gpt-oss"),
    Caching.YES,
    "layers of a kind have blocks of their own; of those with a window only the last are loaded",
    "0.1.0",
    portable="yes; on GPUs if vLLM has one list of pages for each kind",
    offloading=YES,
    sglang="yes, if SGLang keeps windows whole (Gemma 3); else its pools are tested with stubs",
)
CHUNKS = ModelKind(
    "attention in chunks in some layers, full attention in the others",
    ("Llama 4",),
    Caching.YES,
    "as with windows: of layers with chunks the last chunk is loaded",
    "0.1.0",
)
WINDOW_ONLY = ModelKind(
    "a sliding window in every layer",
    ("Mistral 7B v0.1",),
    Caching.YES,
    "only the last window is loaded",
    "0.1.0",
)
SIZES = ModelKind(
    "attention layers of different sizes",
    ("Gemma 4", "MiMo-V2-Flash"),
    Caching.YES,
    "layers of a size have blocks of their own; a context is cut where blocks of all sizes end",
    "0.1.0",
    portable=NOT_RUN,
)
RECURRENT = ModelKind(
    "recurrent layers: Mamba, linear attention, short convolutions",
    ("Qwen3-Next", "Qwen3.5", "Kimi-K3", "Nemotron 3", "Falcon-H1", "LFM2"),
    Caching.YES,
    "a state belongs to one exact number of tokens; it is saved where vLLM keeps one itself, by "
    "default at the last page boundary of a prompt",
    "0.1.0",
    portable="no: each engine keeps states in a form of its own",
    offloading=YES,
    sglang=_SGLANG_POOLS,
)
SPARSE = ModelKind(
    "sparse or compressed attention with an index",
    ("DeepSeek-V3.2", "DeepSeek-V4", "GLM-5"),
    Caching.NOT_YET,
    "the keys of the index are a second kind of page, and vLLM runs these models on GPUs only",
    portable="-",
    not_in_transformers="the keys of the index are not saved",
    sglang=_SGLANG_POOLS,
)
OTHER = ModelKind(
    "layers of another kind, such as cross attention of encoder-decoder models",
    ("Whisper",),
    Caching.NOT_YET,
    "the connector does not know these pages",
    portable="-",
    not_in_transformers="the states of these layers are not known",
    offloading="no: vLLM permits no connector for encoder-decoder models",
    lmcache="no: vLLM permits no connector for encoder-decoder models",
)

MODEL_KINDS = (FULL, WINDOWS, CHUNKS, WINDOW_ONLY, SIZES, RECURRENT, SPARSE, OTHER)
"""The table, in the order in which the pages show it."""


def kind_of(layers: Collection[LayerKind]) -> ModelKind:
    """Return the kind of a model from the layers that keep something of a context."""
    mechanisms = {layer.mechanism for layer in layers}
    found: ModelKind | None = None
    if not mechanisms or "other" in mechanisms:
        found = OTHER
    elif "recurrent" in mechanisms:
        found = RECURRENT
    elif "sparse" in mechanisms:
        found = SPARSE
    elif len({layer.size for layer in layers}) > 1:
        found = SIZES
    elif "full" not in mechanisms:
        found = WINDOW_ONLY
    elif "chunk" in mechanisms:
        found = CHUNKS
    return found or (WINDOWS if "window" in mechanisms else FULL)


def caching_text(kind: ModelKind) -> str:
    """Return a sentence for a person who plans or checks: whether this kind is cached, and why."""
    if kind.caching is Caching.YES:
        return f"the vLLM connector caches this model ({kind.layers})"
    return f"the vLLM connector does not cache this model yet ({kind.layers}): {kind.why}"


def portable_text(kind: ModelKind) -> str:
    """Return a clause about a kind that is cached: at which tensor-parallel sizes it is found."""
    exact = "exact blocks are found only at the tensor-parallel size that wrote them"
    if kind.portable.startswith("no:"):
        return f"{exact}; portable blocks: {kind.portable}"
    return f"{exact}, portable ones at every size; portable: {kind.portable}"


def full_table() -> str:
    """Return the table in Markdown, a row for each kind."""
    rows = [
        f"| {kind.layers} | {', '.join(kind.models)} | {kind.caching} | {kind.since or '-'} | "
        f"{kind.why} | {kind.portable} | {_in_transformers(kind)} |"
        for kind in MODEL_KINDS
    ]
    heads = (
        "| layers of the model | for example | cached behind vLLM | since | why | portable blocks "
        "| cached in transformers |\n|---|---|---|---|---|---|---|"
    )
    return "\n".join((heads, *rows))


def engine_table() -> str:
    """Return the table of kinds and engines in Markdown, a row for each kind."""
    rows = [
        f"| {kind.layers} | {', '.join(kind.models)} | {' | '.join(_in_engines(kind).values())} |"
        for kind in MODEL_KINDS
    ]
    engines = _in_engines(FULL)
    heads = f"| layers of the model | for example | {' | '.join(engines)} |"
    return "\n".join((heads, "|---" * (2 + len(engines)) + "|", *rows))


def _in_engines(kind: ModelKind) -> dict[str, str]:
    """Return by engine whether a kind of model is cached, and if not, why."""
    vllm = YES if kind.caching is Caching.YES else f"no: {kind.why}"
    return {
        "vLLM": vllm,
        "vLLM's own offloading": kind.offloading,
        "transformers": _in_transformers(kind),
        "SGLang": kind.sglang,
        "LMCache": kind.lmcache,
    }


def _in_transformers(kind: ModelKind) -> str:
    return f"no: {kind.not_in_transformers}" if kind.not_in_transformers else "yes"


def transformers_text(kind: ModelKind) -> str:
    """Return a clause: whether `holdfast.transformers` caches this kind of model."""
    if kind.not_in_transformers:
        return f"holdfast.transformers does not cache it: {kind.not_in_transformers}"
    return "holdfast.transformers caches it"


def other_engines_text(kind: ModelKind) -> str:
    """Return clauses: what is known of this kind of model in the other engines."""
    found = _in_engines(kind)
    others = ("vLLM's own offloading", "SGLang", "LMCache")
    return "; ".join(f"{engine}: {found[engine]}" for engine in others)


def short_table() -> str:
    """Return the table in Markdown with a row for each answer."""
    rows = []
    for caching in Caching:
        kinds = [kind for kind in MODEL_KINDS if kind.caching is caching]
        models = ", ".join(model for kind in kinds for model in kind.models)
        rows.append(f"| {models} | {caching} |")
    return "\n".join(("| models, for example | cached behind vLLM |\n|---|---|", *rows))
