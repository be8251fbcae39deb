"""An engine's interface is compared field by field with the one that a binding expects."""

import dataclasses
import logging
from abc import ABC, abstractmethod

import pytest

from holdfast.engines.interface import (
    ExpectedClass,
    InterfaceError,
    check_version,
    differences,
    differences_of,
)

LOG = logging.getLogger("holdfast.test")


class Tier(ABC):
    @abstractmethod
    def load(self, job): ...

    @staticmethod
    def size(nbytes):
        return nbytes


@dataclasses.dataclass
class Job:
    number: int
    keys: list


class Context:
    kind = "plain"

    def __init__(self):
        self.tokens = ()


class MoreToImplement(Tier):
    @abstractmethod
    def pause(self): ...


@pytest.mark.parametrize(
    ("found", "expected", "said"),
    [
        (Tier, ExpectedClass({"load": ("job",), "size": ("nbytes",)}, abstract=True), []),
        (Job, ExpectedClass(fields=("number", "keys")), []),
        (Job, ExpectedClass(fields=("number",), exactly=True), ["Job has a new field keys"]),
        (Tier, ExpectedClass({"save": ("job",)}), ["Tier has no save"]),
        (Tier, ExpectedClass({"load": ("key",)}), ["Tier.load takes job, not key"]),
        (Tier, ExpectedClass(newer={"save": ("job",), "load": ("job",)}), []),
        (Tier, ExpectedClass(newer={"load": ("key",)}), ["Tier.load takes job, not key"]),
        (Job, ExpectedClass(fields=("chunks",)), ["Job has no chunks"]),
        (Context, ExpectedClass(attributes=("kind", "tokens")), []),
        (Context, ExpectedClass(attributes=("pages",)), ["Context has no pages"]),
        (
            MoreToImplement,
            ExpectedClass({"load": ("job",)}, abstract=True),
            ["MoreToImplement has a new abstract method pause"],
        ),
    ],
)
def test_each_difference_is_named(found, expected, said):
    assert differences(found, expected) == said


def test_a_class_that_the_engine_lacks_is_a_difference():
    found = differences_of({"json.Decoder": ExpectedClass(), "no_such.Class": ExpectedClass()})
    assert found == ["there is no json.Decoder", "there is no no_such.Class"]


def test_another_interface_is_refused_with_the_versions_tested():
    with pytest.raises(InterfaceError, match=r"engine 0\.40\.1 .* tested \(0\.32\): Tier has no x"):
        check_version("engine", "0.40.1", ("0.32",), ["Tier has no x"], LOG)


def test_a_version_that_was_not_tested_is_used_and_named_once(caplog):
    for _ in range(2):
        check_version("other engine", "0.33.0", ("0.32",), [], LOG)
    assert caplog.text.count("other engine 0.33.0 was not tested") == 1
    caplog.clear()
    check_version("third engine", "0.32.7", ("0.32",), [], LOG)
    assert not caplog.text
