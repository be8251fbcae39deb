"""With which engines a model is cached, by its config.json: for the commands that name one."""

from __future__ import annotations

from holdfast.client.model_meaning import ANY
from holdfast.engines.cached_models import (
    Caching,
    LayerKind,
    Mechanism,
    ModelKind,
    caching_text,
    kind_of,
    other_engines_text,
    portable_text,
    transformers_text,
)
from holdfast.engines.compared_models import computed_by
from holdfast.errors import ConfigError
from holdfast.finding import Finding, problem
from holdfast.report import Row
from holdfast.sim.model.catalogue import load_config, read_model
from holdfast.sim.model.fields import Fields
from holdfast.sim.model.shape import Attention, ModelShape

_MECHANISMS: dict[str, Mechanism] = {
    "full": "full",
    "window": "window",
    "chunk": "chunk",
    "state": "recurrent",
}


_ENGINES = {"vLLM": "vllm", "transformers": "transformers", "SGLang": "sglang"}
"""Names of engines in fingerprints."""


def kind_of_shape(shape: ModelShape) -> ModelKind:
    """Return the row of the table of cached models that a model belongs to."""
    return kind_of([LayerKind(_mechanism(part), part.elements) for part in shape.attention])


def caching_line(shape: ModelShape) -> str:
    """Return a sentence: whether the connector caches a model, and why not."""
    return caching_text(kind_of_shape(shape))


def caching_row(command: str, shape: ModelShape) -> Row:
    """Return the same for a report."""
    more: dict[str, object] = {
        "cached": kind_of_shape(shape).caching.name.lower(),
        "says": caching_line(shape),
    }
    return Row(what=f"{command}.vllm", value=None, unit="", more=more)


def examine_model(name: str) -> Finding:
    """Return what `holdfast doctor` shows of a model; a model that is not cached is a problem."""
    try:
        fields = load_config(name)
        shape = read_model(fields)
    except ConfigError as error:
        return problem("model", name, f"not known whether the vLLM connector caches it: {error}")
    kind = kind_of_shape(shape)
    others = f"{transformers_text(kind)}; {other_engines_text(kind)}"
    if kind.caching is Caching.NOT_YET:
        return problem("model", shape.name, f"{caching_text(kind)}; {others}")
    parts = (caching_text(kind), portable_text(kind), _sharing_text(kind, fields), others)
    return Finding("model", shape.name, "; ".join(filter(None, parts)), ok=True)


def _sharing_text(kind: ModelKind, fields: Fields) -> str:
    """Return a clause: which engines share portable contexts of a model; empty if it has none."""
    if kind.portable.startswith("no:"):
        return ""
    config = {**fields.data, "model_type": fields.type_name}
    names = [name for name, engine in _ENGINES.items() if computed_by(engine, config, {}) == ANY]
    if not names:
        return (
            "each engine reads its own portable contexts only, because no test has seen "
            f"them compute such a model alike ({fields.type_name or 'of no type'})"
        )
    *first, last = names
    return f"{', '.join(first)} and {last} read each other's portable contexts"


def _mechanism(part: Attention) -> Mechanism:
    if part.index_elements or part.top_k or part.compression != 1:
        return "sparse"
    return _MECHANISMS.get(part.kind, "other")
