"""Compare an engine's interface, as it is installed, with the one that a binding was written for.

A binding to a version that was not tested works if the signatures match, and says so once. Else it
is refused in one sentence that names the versions tested.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.errors import HoldfastError

_logged = set[str]()


class InterfaceError(HoldfastError):
    """An engine's interface is not the one that a binding was written for."""


class ExpectedClass(NamedTuple):
    """What a binding uses of an engine's class.

    `methods`: parameters of each method by name, without `self`. `newer`: the same of methods that
    some versions tested lack. `fields`: names of the fields of a data class; `exactly`: it may have
    no others, because each of them identifies something. `attributes`: names that the class has, or
    that its constructor sets on an object. `abstract`: whether the class may have no other abstract
    methods.
    """

    methods: Mapping[str, tuple[str, ...]] = {}
    newer: Mapping[str, tuple[str, ...]] = {}
    fields: Collection[str] = ()
    attributes: Collection[str] = ()
    abstract: bool = False
    exactly: bool = False


def differences_of(interface: Mapping[str, ExpectedClass]) -> list[str]:
    """Return in words how an installed engine differs from the classes that a binding expects.

    `interface`: by the name of the class, with its module's: `package.module.Class`.
    """
    texts = list[str]()
    for path, expected in interface.items():
        module, _, name = path.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            found = None
        texts += [f"there is no {path}"] if found is None else differences(found, expected)
    return texts


def differences(found: type[Any], expected: ExpectedClass) -> list[str]:
    """Return in words how an installed class differs from what a binding expects of it."""
    name, texts = found.__name__, list[str]()
    for method, parameters in {**expected.methods, **expected.newer}.items():
        function = inspect.getattr_static(found, method, None)
        if function is None:
            texts += [f"{name} has no {method}"] if method in expected.methods else []
            continue
        signature = inspect.signature(getattr(function, "__func__", function))
        skipped = 0 if isinstance(function, staticmethod) else 1
        has = tuple(signature.parameters)[skipped:]
        if has != parameters:
            texts.append(f"{name}.{method} takes {', '.join(has)}, not {', '.join(parameters)}")
    if expected.fields:
        has_fields = _fields(found)
        texts += [f"{name} has no {field}" for field in expected.fields if field not in has_fields]
        others = sorted(has_fields.difference(expected.fields)) if expected.exactly else []
        texts += [f"{name} has a new field {field}" for field in others]
    if expected.attributes:
        has_names = names_of(found)
        texts += [f"{name} has no {one}" for one in expected.attributes if one not in has_names]
    if expected.abstract:
        more: set[str] = set(getattr(found, "__abstractmethods__", ()))
        more -= expected.methods.keys() | expected.newer.keys()
        texts += [f"{name} has a new abstract method {method}" for method in sorted(more)]
    return texts


def check_version(
    engine: str,
    version: str,
    tested: Collection[str],
    found: Sequence[str],
    log: logging.Logger,
) -> None:
    """Raise InterfaceError for differences; warn once of a version that was not tested.

    `tested`: versions, or what versions begin with, such as "0.32".
    """
    known = ", ".join(sorted(tested))
    if found:
        raise InterfaceError(
            f"{engine} {version} has another interface than the versions tested ({known}): "
            f"{found[0]}; install a tested version, or a newer Holdfast"
        )
    if not any(f"{version}.".startswith(f"{one}.") for one in tested) and engine not in _logged:
        _logged.add(engine)
        log.warning(
            "%s %s was not tested with this Holdfast (tested: %s); its interface is the same",
            engine,
            version,
            known,
        )


def names_of(found: type[Any]) -> set[str]:
    """Return the names that a class has, and those that its constructors set or use."""
    names = set(dir(found)) | _fields(found)
    for each in found.__mro__:
        code = getattr(each.__dict__.get("__init__"), "__code__", None)
        names.update(code.co_names if code is not None else ())
    return names


def _fields(found: type[Any]) -> set[str]:
    if dataclasses.is_dataclass(found):
        return {field.name for field in dataclasses.fields(found)}
    return set(getattr(found, "_fields", ())) | set(inspect.get_annotations(found))
