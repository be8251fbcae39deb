"""What every command that measures has in common: its options, where it works, how it ends."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.config import PRIVATE_PARENT
from holdfast.errors import ConfigError
from holdfast.rig import model, report
from holdfast.rig.report import Report, Row

if TYPE_CHECKING:
    from rich.status import Status

ROUNDS_MIN = 5
"""Medians of fewer say little on a shared machine."""


def add_rounds_argument(
    parser: argparse.ArgumentParser,
    rounds: int,
    about: str = "paired rounds",
    least: int = ROUNDS_MIN,
) -> None:
    """Declare `--rounds N`; fewer than `least` are refused."""

    def count(text: str) -> int:
        found = int(text)
        if found < least:
            raise ConfigError(f"--rounds: {found} is fewer than {least}; raise it")
        return found

    parser.add_argument(
        "--rounds",
        type=count,
        default=rounds,
        metavar="N",
        help=f"{about}, at least {least} (default: %(default)s)",
    )


def add_quick_argument(parser: argparse.ArgumentParser, about: str) -> None:
    """Declare `--quick`: fewer rows or smaller ones, never another way to measure."""
    parser.add_argument("--quick", action="store_true", help=about)


def add_folder_argument(parser: argparse.ArgumentParser, holds: str) -> None:
    """Declare `--folder FOLDER`, for `scratch`."""
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(PRIVATE_PARENT),
        help=f"where to put {holds} (default: %(default)s)",
    )


def add_keep_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--keep FOLDER`, for `engines`."""
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and store here")


def add_model_argument(parser: argparse.ArgumentParser, name: str) -> None:
    """Declare `--model NAME`: one of those that are made here."""
    parser.add_argument(
        "--model",
        choices=sorted(model.SHAPES),
        default=name,
        help="the model that is made (default: %(default)s)",
    )


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """Lend a folder that is gone afterwards. Raises ConfigError if none can be made in `parent`."""
    try:
        lent = tempfile.TemporaryDirectory(prefix="holdfast-", dir=parent)
    except OSError as error:
        raise ConfigError(
            f"--folder {parent}: {error.strerror}; name a folder that can be written"
        ) from error
    with lent as folder:
        yield Path(folder)


@contextmanager
def engines(keep: Path | None) -> Iterator[Path]:
    """Lend a folder of absolute path for the logs and the store of engines; `keep` is kept.

    Raises ConfigError where vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed here: `make setup` brings its CPU build; "
            "see docs/how-to/set-up.md"
        )
    with scratch(Path(PRIVATE_PARENT)) as folder:
        yield (keep or folder).absolute()


def aloud(rows: Iterable[Row], status: Status) -> Iterator[Row]:
    """Yield rows and print each as it comes, for those that take long."""
    for row in rows:
        about = [row.more[name] for name in ("source", "tokens") if name in row.more]
        status.console.print(row.what, *about, report.number(row.value))
        yield row


def finish(found: Report, target: str | None) -> int:
    """Write a report where it is wanted; return 0 if every goal was met, else 1."""
    if target:
        report.write(found, target)
    return 0 if found.ok else 1
