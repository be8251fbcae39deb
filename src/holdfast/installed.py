"""Objects that other installed packages register in an entry point group, one for each name."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, TypeVar

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


def entry_points(group: str) -> Collection[EntryPoint]:
    """Return the entry points of a group, without loading their objects."""
    from importlib import metadata  # 20 ms, which a start with built-in kinds must not spend

    return metadata.entry_points(group=group)


def find_installed(
    group: str, name: str, kind: type[T], what: str, error: type[HoldfastError]
) -> T | None:
    """Return the object of a type that a package registers by a name; None if there is none.

    Raises `error`, whose message begins with `what`, if several packages register the name, or if
    the object cannot be loaded or is of another type.
    """
    points = [point for point in entry_points(group) if point.name == name]
    if not points:
        return None
    if len(points) > 1:
        offered = ", ".join(sorted(point.value for point in points))
        raise error(f"{what}: offered by {offered}; uninstall all but one")
    try:
        found = points[0].load()
    except Exception as reason:  # code of another package
        raise error(
            f"{what}: {points[0].value} cannot be loaded: {reason!r}; fix or reinstall the "
            "package that offers it"
        ) from reason
    if not isinstance(found, kind):
        raise error(
            f"{what}: {points[0].value} is of type {type(found).__name__}, not a "
            f"{kind.__module__}.{kind.__name__}; update the package that offers it"
        )
    return found
