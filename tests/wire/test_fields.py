"""Every field of every message has a bound, which msgspec checks when it decodes."""

import msgspec
import pytest
from msgspec import inspect

from holdfast.wire import fields
from holdfast.wire.local import messages as local
from holdfast.wire.remote import messages as remote

MESSAGES = sorted(
    {
        struct.cls
        for union in (local.Request, local.Reply, remote.TargetRequest, remote.TargetReply)
        for struct in inspect.type_info(union).types
    },
    key=lambda kind: f"{kind.__module__}.{kind.__name__}",
)


def unbounded(kind, at):
    """Yield the path of every part of a field's type that has no bound."""
    match kind:
        case inspect.StrType() | inspect.BytesType():
            if kind.max_length is None:
                yield at
        case inspect.IntType():
            if kind.ge is None or kind.le is None:
                yield at
        case inspect.ListType():
            if kind.max_length is None:
                yield at
            yield from unbounded(kind.item_type, f"{at}[]")
        case inspect.DictType():
            if kind.max_length is None:
                yield at
            yield from unbounded(kind.key_type, f"{at} key")
            if at != "ReportReply.data":  # plain data of any shape, in one frame
                yield from unbounded(kind.value_type, f"{at} value")
        case inspect.TupleType():
            for i, part in enumerate(kind.item_types):
                yield from unbounded(part, f"{at}[{i}]")
        case inspect.StructType():
            for field in kind.fields:
                yield from unbounded(field.type, f"{at}.{field.name}")
        case inspect.FloatType() | inspect.BoolType() | inspect.LiteralType():
            pass  # of fixed size; the receiver checks the range of a float by name
        case _:
            yield at


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_has_a_bound(kind):
    found = [
        path
        for field in inspect.type_info(kind).fields
        for path in unbounded(field.type, f"{kind.__name__}.{field.name}")
    ]
    assert found == []


def test_both_protocols_are_covered():
    defined = {
        each
        for module in (local, remote)
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, msgspec.Struct)
    }
    abstract = {each for each in defined if each.__struct_config__.tag is None} | {
        remote.NamedBlocks, remote._Message, local._Message,
    }  # fmt: skip
    assert set(MESSAGES) == defined - abstract


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (TRACEPARENT, TRACEPARENT),
        ("", ""),
        (TRACEPARENT + "-", ""),
        (TRACEPARENT + "\n", ""),
        (f" {TRACEPARENT}", ""),
        (TRACEPARENT.upper(), ""),
        (f"{TRACEPARENT}-" + " " * 1_000_000 + "\n\nx", ""),
        ("what is this?", ""),
    ],
)
def test_only_a_traceparent_of_55_characters_is_one(text, kept):
    assert fields.traceparent(text) == kept
