"""The fingerprint: every field counts, none may be missing, and its bytes never change."""

import hashlib
import json

import msgspec
import pytest

from holdfast.blocks.fingerprint import Fingerprint, KvGroup, Meaning
from holdfast.blocks.layout import ExactLayout, HeadState, Layout, PortableLayout, RankSlice
from holdfast.errors import BlockError

LAYOUT = Layout.portable(layers=2, kv_heads=4, head_size=8, dtype="bfloat16", block_tokens=16)
EXACT = ExactLayout(
    dtype="bfloat16",
    block_tokens=16,
    layers=2,
    kv_heads=4,
    head_size=8,
    page_tokens=16,
    page_bytes=1024,
    packing="amx",
    engine="vllm",
    engine_version="0.32.0",
    backend="CPU_ATTN",
    device="cpu",
    slice=RankSlice(tp_rank=1, tp_size=2, pp_rank=0, pp_size=1),
)
MEANING = Meaning(
    model="sha256:00",
    positions="{}",
    adapter="none",
    kv_quantisation="none",
    kv_scales="none",
    naming="tokens",
    block_tokens=16,
    kv_group=KvGroup.all_layers(2),
)
PORTABLE_FINGERPRINT = Fingerprint(MEANING, LAYOUT)
EXACT_FINGERPRINT = Fingerprint(MEANING, EXACT)
QUANTISED_FINGERPRINT = PORTABLE_FINGERPRINT.quantised("int8", 1)
BOTH = pytest.mark.parametrize(
    "fingerprint",
    [PORTABLE_FINGERPRINT, QUANTISED_FINGERPRINT, EXACT_FINGERPRINT],
    ids=["portable", "quantised", "exact"],
)


def replace(struct, path, value):
    """Return a copy of nested structs with one field changed, for example `meaning.model`."""
    field, _, rest = path.partition(".")
    new = replace(getattr(struct, field), rest, value) if rest else value
    return msgspec.structs.replace(struct, **{field: new})


def paths(fields, before=""):
    """Yield the path of every field of nested dictionaries, tags of unions excepted."""
    for name, value in fields.items():
        if name != "kind":
            yield before + name
            if isinstance(value, dict):
                yield from paths(value, f"{before}{name}.")


def section_of(fields, path):
    """Return the dictionary that holds the last field of a path, and that field's name."""
    *sections, name = path.split(".")
    for section in sections:
        fields = fields[section]
    return fields, name


def test_the_digest_of_portable_blocks_matches_the_golden_vector():
    assert PORTABLE_FINGERPRINT.digest().hex() == "beb1129d2100670e2de7a5c3f47eb598"


def test_the_digest_of_exact_blocks_matches_the_golden_vector():
    assert EXACT_FINGERPRINT.digest().hex() == "39d7d03213164c2fd6a69377587e548e"


def test_the_digest_of_quantised_blocks_matches_the_golden_vector():
    assert QUANTISED_FINGERPRINT.digest().hex() == "c0de55547b564d8b1de43189bc9b6e6a"


@pytest.mark.parametrize("fingerprint", [QUANTISED_FINGERPRINT, EXACT_FINGERPRINT])
def test_only_portable_blocks_that_are_exact_can_be_quantised(fingerprint):
    with pytest.raises(BlockError, match="block cannot be quantised, only a portable one"):
        fingerprint.quantised("int8", 1)


@BOTH
def test_the_digest_is_as_documented(fingerprint):
    text = json.dumps(
        msgspec.to_builtins(fingerprint), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    digest = hashlib.blake2b(text.encode(), digest_size=16, person=b"holdfast-fprint2").digest()
    assert fingerprint.digest() == digest


def mutations():
    for field in ("model", "positions", "adapter", "kv_quantisation", "kv_scales", "naming"):
        yield replace(PORTABLE_FINGERPRINT, f"meaning.{field}", "other")
    for group in (
        KvGroup("recurrent", 0, (0, 1)),
        KvGroup("window", 4096, (0, 1)),
        KvGroup("window", 8192, (0, 1)),
        KvGroup("chunk", 4096, (0, 1)),
        KvGroup("full", 0, (0, 2)),
    ):
        yield replace(PORTABLE_FINGERPRINT, "meaning.kv_group", group)
    for layers in (
        (HeadState(5, 8, 8),) * 2,
        (HeadState(4, 9, 8),) * 2,
        (HeadState(4, 8, 9),) * 2,
        (HeadState(4, 8, 8), HeadState(4, 9, 8)),
    ):
        yield replace(PORTABLE_FINGERPRINT, "representation.layers", layers)
    yield replace(PORTABLE_FINGERPRINT, "representation.dtype", "float16")
    longer = msgspec.structs.replace(MEANING, block_tokens=32)
    yield Fingerprint(longer, msgspec.structs.replace(LAYOUT, block_tokens=32))
    yield Fingerprint(longer, msgspec.structs.replace(EXACT, block_tokens=32))
    yield QUANTISED_FINGERPRINT
    yield PORTABLE_FINGERPRINT.quantised("int8", 2)
    yield PORTABLE_FINGERPRINT.quantised("other", 1)
    yield EXACT_FINGERPRINT
    for field in ("kv_heads", "head_size", "page_bytes"):
        value = getattr(EXACT, field) + 1
        yield replace(EXACT_FINGERPRINT, f"representation.{field}", value)
    yield replace(EXACT_FINGERPRINT, "representation.page_tokens", 8)
    for field in ("dtype", "packing", "engine", "engine_version", "backend", "device"):
        yield replace(EXACT_FINGERPRINT, f"representation.{field}", "other")
    for field, value in (("tp_rank", 0), ("tp_size", 4), ("pp_size", 2)):
        yield replace(EXACT_FINGERPRINT, f"representation.slice.{field}", value)
    stage = RankSlice(tp_rank=1, tp_size=2, pp_rank=1, pp_size=2)
    yield replace(EXACT_FINGERPRINT, "representation.slice", stage)


def test_every_field_changes_the_digest():
    several = [PORTABLE_FINGERPRINT, *mutations()]
    assert len(several) == 37
    assert len({fingerprint.digest() for fingerprint in several}) == len(several)


def test_a_portable_fingerprint_says_nothing_of_engine_version_device_or_slice():
    assert set(PortableLayout.__struct_fields__) == {"dtype", "block_tokens", "layers"}


@BOTH
def test_a_missing_field_is_refused_by_name(fingerprint):
    for path in paths(msgspec.to_builtins(fingerprint)):
        fields = msgspec.to_builtins(fingerprint)
        section, name = section_of(fields, path)
        del section[name]
        with pytest.raises(msgspec.ValidationError, match=f"missing required field `{name}`"):
            msgspec.convert(fields, Fingerprint)


@BOTH
def test_an_unknown_field_is_refused_by_name(fingerprint):
    for path in paths(msgspec.to_builtins(fingerprint)):
        fields = msgspec.to_builtins(fingerprint)
        section, _ = section_of(fields, path)
        section["colour"] = "blue"
        with pytest.raises(msgspec.ValidationError, match="unknown field `colour`"):
            msgspec.convert(fields, Fingerprint)


@BOTH
def test_a_field_of_another_type_is_refused_with_its_path(fingerprint):
    for path in paths(msgspec.to_builtins(fingerprint)):
        fields = msgspec.to_builtins(fingerprint)
        section, name = section_of(fields, path)
        section[name] = 1.5
        with pytest.raises(msgspec.ValidationError, match=rf"`\$\.{path}`"):
            msgspec.convert(fields, Fingerprint)


def test_a_call_without_one_of_the_fields_names_it():
    fields = {"model": "m", "positions": "{}", "adapter": "none", "kv_quantisation": "none"}
    with pytest.raises(TypeError, match="kv_scales"):
        Fingerprint.portable(LAYOUT, **fields)
    with pytest.raises(TypeError, match="kv_group"):
        Meaning(**fields, kv_scales="none", naming="tokens", block_tokens=16)


def test_the_short_form_is_a_model_with_full_attention_in_every_layer():
    fields = {"model": "sha256:00", "positions": "{}", "adapter": "none"}
    short = Fingerprint.portable(LAYOUT, **fields, kv_quantisation="none", kv_scales="none")
    assert short == PORTABLE_FINGERPRINT


@pytest.mark.parametrize(
    "field", ["model", "positions", "adapter", "kv_quantisation", "kv_scales", "naming"]
)
@pytest.mark.parametrize(("value", "fault"), [("", "is empty"), (None, "is None")])
def test_a_text_that_says_nothing_is_refused_by_name(field, value, fault):
    with pytest.raises(BlockError, match=f"fingerprint.{field} {fault}"):
        msgspec.structs.replace(MEANING, **{field: value})


@pytest.mark.parametrize("field", ["packing", "engine", "engine_version", "backend", "device"])
def test_an_exact_layout_that_does_not_say_its_build_is_refused(field):
    with pytest.raises(BlockError, match=f"layout.{field} is ''; it must be a text"):
        msgspec.structs.replace(EXACT, **{field: ""})


def test_parts_that_contradict_each_other_are_refused():
    with pytest.raises(BlockError, match=r"meaning.block_tokens is 32, the layout's 16"):
        replace(PORTABLE_FINGERPRINT, "meaning.block_tokens", 32)
    with pytest.raises(BlockError, match=r"kv_group has 3 layers, the layout 2"):
        replace(EXACT_FINGERPRINT, "meaning.kv_group", KvGroup.all_layers(3))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (("sparse", 0, (0,)), "attention is 'sparse'; known: full, window, chunk, recurrent"),
        (("full", 128, (0,)), "window is 128; for full attention it must be 0"),
        (("window", 0, (0,)), "window is 0; for window attention it must be at least 1"),
        (("full", 0, ()), "0 layers; from 1 to"),
        (("full", 0, (1, 0)), "0 follows 1"),
        (("full", 0, (-1,)), "-1 follows -1"),
    ],
)
def test_an_impossible_group_of_layers_is_refused(fields, expected):
    with pytest.raises(BlockError, match=expected):
        KvGroup(*fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [((2, 2, 0, 1), "tp_rank is 2; with tp_size 2"), ((0, 1, 0, 0), "pp_size is 0")],
)
def test_an_impossible_rank_is_refused(fields, expected):
    with pytest.raises(BlockError, match=expected):
        RankSlice(*fields)


@BOTH
def test_a_fingerprint_survives_conversion_to_plain_data(fingerprint):
    assert msgspec.convert(msgspec.to_builtins(fingerprint), Fingerprint) == fingerprint
