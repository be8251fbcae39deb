"""Measure what a lossy codec does to the text that follows a coded context, in units of noise.

A prompt's first tokens are the context. The model computes their keys and values, the codec changes
them, and the model computes the tokens that follow over either. The *control* computes everything
with other arithmetic, which no output may be said to depend on: the same model in fp32, or in
batches of another shape. Runs in transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from holdfast.blocks.layout import HeadState, PortableLayout
from holdfast.client.local_model import portable_fingerprint
from holdfast.client.weights_digest import NoDigestError
from holdfast.codec.gate import Difference
from holdfast.codec.int8 import DTYPES, Int8
from holdfast.errors import ConfigError
from holdfast_bench.harness.standard_error import of_mean

if TYPE_CHECKING:
    import numpy.typing as npt

NO_TRANSFORMERS = (
    "judging a codec needs torch and transformers: pip install torch transformers, in an "
    "environment of its own if this one serves"
)

Cache: TypeAlias = list[tuple[Any, Any]]
"""Keys and values of each layer, tensors [head, token, channel]."""

Coder: TypeAlias = Callable[[Cache], Cache]
"""Returns what a codec keeps of a cache, in the same dtype; does not change its argument."""


class Lengths(NamedTuple):
    """Number of prompts; of tokens that are coded, and that are judged, of each."""

    prompts: int
    coded: int
    judged: int

    @property
    def tokens(self) -> int:
        """Tokens of a prompt that are used; the last one is only predicted."""
        return self.coded + self.judged + 1


class Positions(NamedTuple):
    """Two runs at each judged position of one prompt.

    `is_hit`: the second run's top token is the text's.
    """

    divergence: npt.NDArray[np.float64]
    same_top: npt.NDArray[np.bool_]
    nats_lost: npt.NDArray[np.float64]
    is_hit: npt.NDArray[np.bool_]


class JudgedModel:
    """A causal language model in a folder, and the one that its noise is measured with.

    `dtype`: of the model, empty for that of its weights. `control`: "float32", a second copy of the
    model in fp32; "batch", the same model with other shapes. Raises ConfigError for a model that
    cannot be judged.
    """

    def __init__(self, folder: Path, dtype: str, control: str, device: str) -> None:
        try:
            import torch
            import transformers
        except ModuleNotFoundError as error:
            raise ConfigError(NO_TRANSFORMERS) from error
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"--model {folder}: has no config.json; name the folder of a model as transformers "
                "reads it"
            )
        transformers.utils.logging.disable_progress_bar()
        if dtype and dtype not in DTYPES:
            raise ConfigError(f"--dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
        self.folder, self.control, self._device = folder, control, _checked_device(device)
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            self._model = load(folder, dtype=dtype or "auto").to(device).eval()
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ConfigError(f"--model {folder}: cannot be loaded: {error}") from error
        self.dtype = str(self._model.dtype).removeprefix("torch.")
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"--model {folder}: is of dtype {self.dtype}; int8 takes {', '.join(DTYPES)}"
            )
        if control == "float32" and self.dtype == "float32":
            raise ConfigError(
                "--control float32: the model is in fp32 itself; use --control batch, or judge "
                "the dtype that is served, such as --dtype bfloat16"
            )
        self._precise = self._model
        if control == "float32":
            try:
                self._precise = load(folder, dtype=torch.float32).to(device).eval()
            except RuntimeError as error:
                raise ConfigError(
                    f"--control float32: a copy of the model in fp32 cannot be loaded: {error}; "
                    "use --control batch"
                ) from error
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.engine = f"{versions}, {self.dtype} on {device}"

    def tokens(self, text: str) -> npt.NDArray[np.int64]:
        """Return the tokens of a text."""
        found = self._tokenizer(text, verbose=False)["input_ids"]
        return np.asarray(found, np.int64)

    def digest(self, layout: PortableLayout) -> str:
        """Return the model of this folder, as in the meaning of its portable blocks' fingerprint.

        Raises ConfigError if the folder has no safetensors files.
        """
        try:
            return portable_fingerprint(self.folder, layout).meaning.model
        except (NoDigestError, OSError) as error:
            raise ConfigError(
                f"--model {self.folder}: {error}; then give it to --model-digest, too"
            ) from error

    def layout(self, cache: Cache, block_tokens: int) -> PortableLayout:
        """Return the portable layout of a block of a cache."""
        layers = (
            HeadState(int(keys.shape[0]), int(keys.shape[2]), int(values.shape[2]))
            for keys, values in cache
        )
        return PortableLayout(self.dtype, block_tokens, tuple(layers))

    def context(self, tokens: npt.NDArray[np.int64]) -> Cache:
        """Compute the keys and values of a context."""
        return _layers(self._prefill(self._model, tokens, 1), len(tokens))

    def follow(self, cache: Cache, tokens: npt.NDArray[np.int64]) -> Any:  # noqa: ANN401
        """Return the logits of tokens after a context: [token, vocabulary] in fp32."""
        import torch
        from transformers import DynamicCache

        pairs = [(keys[None].clone(), values[None].clone()) for keys, values in cache]
        held = DynamicCache(ddp_cache_data=pairs, config=self._model.config)
        with torch.no_grad():
            return self._forward(self._model, tokens[None], held)[0].float()

    def follow_otherwise(
        self, context: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
    ) -> Any:  # noqa: ANN401
        """Return the logits of tokens after a context, both computed as the control computes."""
        import torch

        rows = 1 if self.control == "float32" else 2
        with torch.no_grad():
            cache = self._prefill(self._precise, context, rows)
            batch = np.repeat(tokens[None], rows, 0)
            return self._forward(self._precise, batch, cache)[0].float()

    def _prefill(self, model: Any, tokens: npt.NDArray[np.int64], rows: int) -> Any:  # noqa: ANN401
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        with torch.no_grad():  # without the logits
            self._forward(model.base_model, np.repeat(tokens[None], rows, 0), cache)
        return cache

    def _forward(self, model: Any, tokens: npt.NDArray[np.int64], cache: Any) -> Any:  # noqa: ANN401
        import torch

        ids = torch.from_numpy(np.ascontiguousarray(tokens)).to(self._device)
        with warnings.catch_warnings():
            # Later versions of transformers call the argument `cache`.
            warnings.simplefilter("ignore", FutureWarning)
            return model(input_ids=ids, past_key_values=cache)[0]


def judge(
    model: JudgedModel,
    prompts: Sequence[npt.NDArray[np.int64]],
    lengths: Lengths,
    coders: dict[str, Coder],
    show: Callable[[int], None] = lambda _done: None,
) -> tuple[Difference, dict[str, Difference]]:
    """Return how the control differs from the model, and how each coded run does.

    Raises ConfigError for a model whose control does not differ, because it has no noise to compare
    with.
    """
    control: list[Positions] = []
    coded: dict[str, list[Positions]] = {name: [] for name in coders}
    for number, prompt in enumerate(prompts):
        context, rest = prompt[: lengths.coded], prompt[lengths.coded : lengths.tokens]
        cache = model.context(context)
        exact = model.follow(cache, rest[:-1])
        otherwise = model.follow_otherwise(context, rest[:-1])
        control.append(positions(otherwise, exact, rest[1:]))
        for name, coder in coders.items():
            changed = model.follow(coder(cache), rest[:-1])
            coded[name].append(positions(exact, changed, rest[1:]))
        show(number + 1)
    noise = difference(control)
    if not noise.kl > 0:
        raise ConfigError(
            f"--control {model.control}: gives the same output to the last bit, so it shows no "
            "noise to compare with; use --control float32"
        )
    return noise, {name: difference(found) for name, found in coded.items()}


def positions(first: Any, second: Any, text: npt.NDArray[np.int64]) -> Positions:  # noqa: ANN401
    """Compare two runs at each position of a text, from their logits."""
    import torch

    p, q = first.double().log_softmax(-1), second.double().log_softmax(-1)
    at = torch.from_numpy(text).to(p.device)[:, None]
    return Positions(
        (p.exp() * (p - q)).sum(-1).cpu().numpy(),
        (p.argmax(-1) == q.argmax(-1)).cpu().numpy(),
        (p.gather(1, at) - q.gather(1, at))[:, 0].cpu().numpy(),
        (q.argmax(-1) == at[:, 0]).cpu().numpy(),
    )


def difference(found: Sequence[Positions]) -> Difference:
    """Return the figures over all positions of all prompts."""
    divergence = np.concatenate([each.divergence for each in found])
    scores = [float(each.is_hit.mean()) for each in found]
    return Difference(
        kl=float(divergence.mean()),
        kl_p99=float(np.quantile(divergence, 0.99)),
        same_top=float(np.concatenate([each.same_top for each in found]).mean()),
        nats_lost=float(np.concatenate([each.nats_lost for each in found]).mean()),
        score=fmean(scores),
        score_error=of_mean(scores) if len(scores) > 1 else 0.0,
    )


class Int8Coder:
    """Applies the codec `int8` to a cache, block by block; counts blocks, and those left exact."""

    def __init__(self, layout: PortableLayout) -> None:
        self._tokens, self._codec = layout.block_tokens, Int8(layout)
        self.blocks = self.exact_blocks = 0

    def __call__(self, cache: Cache) -> Cache:
        """Return what the codec keeps of a cache, whose tokens fill its blocks."""
        import torch

        kept = [(keys.clone(), values.clone()) for keys, values in cache]
        for start in range(0, kept[0][0].shape[1], self._tokens):
            parts = [part[:, start : start + self._tokens] for pair in kept for part in pair]
            raw = np.concatenate([_bytes_of(part) for part in parts])
            self.blocks += 1
            self.exact_blocks += not self._codec.quantised(raw.data)
            whole: Any = torch.from_numpy(raw).view(parts[0].dtype)
            at = 0
            for part in parts:
                part.copy_(whole[at : at + part.numel()].view(part.shape))
                at += part.numel()
        return kept


def read_prompts(file: Path, model: JudgedModel, lengths: Lengths) -> list[npt.NDArray[np.int64]]:
    """Return the tokens of the prompts in a file. Raises ConfigError if it has too few.

    `.jsonl`: a prompt a line, as a string or as the field `prompt` or `text` of an object; those
    that are too short are left out. Another file is one text, from which prompts are taken at even
    distances.
    """
    import msgspec

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {file}: cannot be read: {error}") from error
    found: list[npt.NDArray[np.int64]]
    if file.suffix != ".jsonl":
        tokens = model.tokens(text)
        count = min(lengths.prompts, len(tokens) // lengths.tokens)
        starts = np.linspace(0, len(tokens) - lengths.tokens, count).astype(int)
        found = [tokens[start : start + lengths.tokens] for start in starts]
    else:
        lines = list[Any]()
        for number, line in enumerate(text.split("\n"), 1):
            try:
                lines += [msgspec.json.decode(line)] if line.strip() else []
            except (msgspec.DecodeError, RecursionError) as error:
                raise ConfigError(
                    f"--prompts {file}: line {number} is not JSON: {error}; correct it, or name a "
                    "text by another ending than .jsonl"
                ) from error
        texts = [
            line.get("prompt") or line.get("text") if isinstance(line, dict) else line
            for line in lines
        ]
        each = (model.tokens(line) for line in texts if isinstance(line, str))
        found = [tokens[: lengths.tokens] for tokens in each if len(tokens) >= lengths.tokens]
    if len(found) < lengths.prompts:
        raise ConfigError(
            f"--prompts {file}: has {len(found)} prompts of {lengths.tokens} tokens, and "
            f"{lengths.prompts} are needed; add longer prompts, or lower --count, after which the "
            "result permits nothing"
        )
    return found[: lengths.prompts]


def _checked_device(device: str) -> str:
    """Return the name of a device that torch can use here; raise ConfigError for another one."""
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"--device: torch cannot use {device!r} here: {reason}; use another, such as cpu"
        ) from error
    return device


def _layers(cache: Any, tokens: int) -> Cache:  # noqa: ANN401
    """Return the keys and values in a cache of transformers; raise ConfigError for other state."""
    found = []
    for number, layer in enumerate(cache.layers):
        keys: Any = getattr(layer, "keys", None)
        values: Any = getattr(layer, "values", None)
        if type(layer).__name__ != "DynamicLayer" or keys is None or keys.shape[-2] != tokens:
            raise ConfigError(
                f"layer {number} keeps {type(layer).__name__}, not keys and values of all tokens; "
                "int8 codes these only"
            )
        found.append((keys[0], values[0]))
    return found


def _bytes_of(part: Any) -> npt.NDArray[np.uint8]:  # noqa: ANN401
    import torch

    found: npt.NDArray[np.uint8] = part.cpu().contiguous().view(torch.uint8).numpy().ravel()
    return found


def _uniform(bits: int, axis: int) -> Callable[[Any], Any]:
    """Return a symmetric coder of [head, token, channel] with fp16 steps along an axis."""

    def code(x: Any) -> Any:  # noqa: ANN401
        top = 2 ** (bits - 1) - 1
        step = (x.abs().amax(axis, keepdim=True) / top).half().float().clamp(min=2**-24)
        return (x / step).round().clamp(-top, top) * step

    return code


def _float8(x: Any) -> Any:  # noqa: ANN401
    """Code [head, token, channel] as fp8 e4m3 with a step per head."""
    import torch

    top = torch.finfo(torch.float8_e4m3fn).max
    step = x.abs().amax((1, 2), keepdim=True) / top
    return (x / step).clamp(-top, top).to(torch.float8_e4m3fn).float() * step


def comparisons(block_tokens: int) -> dict[str, Coder]:
    """Return coders with larger errors than int8, to see that the gate tells them apart."""
    kinds = {
        "int6, keys by channel": (_uniform(6, 1), _uniform(6, 2)),
        "fp8 e4m3, by head": (_float8, _float8),
        "int4, by token": (_uniform(4, 2), _uniform(4, 2)),
    }

    def coder(keys: Callable[[Any], Any], values: Callable[[Any], Any]) -> Coder:
        def code(cache: Cache) -> Cache:
            return [
                (_by_block(k, keys, block_tokens), _by_block(v, values, block_tokens))
                for k, v in cache
            ]

        return code

    return {name: coder(*pair) for name, pair in kinds.items()}


def _by_block(x: Any, code: Callable[[Any], Any], tokens: int) -> Any:  # noqa: ANN401
    import torch

    blocks = _blocks(x, tokens)
    return torch.cat([code(block.float()).to(x.dtype) for block in blocks], 1)


def _blocks(x: Any, tokens: int) -> Iterator[Any]:  # noqa: ANN401
    for start in range(0, x.shape[1], tokens):
        yield x[:, start : start + tokens]
