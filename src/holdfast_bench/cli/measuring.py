"""Shared parts of the measuring commands: options, scratch folders, rows and exit status."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, TypeVar

import msgspec

from holdfast import report
from holdfast.config import PRIVATE_PARENT
from holdfast.errors import ConfigError
from holdfast.report import Report, Row
from holdfast.scratch import RUN, scratch_folder
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness import model

if TYPE_CHECKING:
    from rich.console import Console

Result = TypeVar("Result")

NO_VLLM = "vLLM is not installed here: `make setup` brings its CPU build; see docs/how-to/set-up.md"

ROUNDS_MIN = 5
"""Fewer rounds give no reliable median on a shared machine."""


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


def add_duration(parser: argparse.ArgumentParser, takes: str) -> None:
    """Say in the help of a subject what its full length takes."""
    parser.description = f"{parser.description}. Takes about {takes}."


def add_only_argument(parser: argparse.ArgumentParser, parts: Mapping[str, str]) -> None:
    """Declare `--only PART...`, all by default, and list the parts at the end of the help."""
    lines = "\n".join(f"  {name:<11}{about}" for name, about in parts.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"parts:\n{lines}\n\n{parser.epilog}" if parser.epilog else f"parts:\n{lines}"
    parser.add_argument(
        "--only", nargs="+", choices=parts, metavar="PART", help="measure these parts alone"
    )


def add_quick_argument(parser: argparse.ArgumentParser, about: str) -> None:
    """Declare `--quick`: fewer or smaller rows, measured in the same way."""
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
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep logs and store in this new or empty folder",
    )


def add_model_argument(parser: argparse.ArgumentParser, name: str) -> None:
    """Declare `--model NAME`: one of the generated models."""
    parser.add_argument(
        "--model",
        choices=sorted(model.SHAPES),
        default=name,
        help="the model that is made (default: %(default)s)",
    )


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """Create a folder in `parent`, and remove it at the end; raise ConfigError if refused."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(scratch_folder(parent, RUN))
        except OSError as error:
            raise ConfigError(
                f"--folder {parent}: {error.strerror}; name a folder that can be written"
            ) from error
        yield folder


@contextmanager
def engines(keep: Path | None) -> Iterator[Path]:
    """Yield a folder as `run_folder` does; raise ConfigError if vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ConfigError(NO_VLLM)
    with run_folder(keep) as folder:
        yield folder


@contextmanager
def run_folder(keep: Path | None) -> Iterator[Path]:
    """Yield the absolute path of a folder for the logs and the store of engines.

    It is `keep`, or else a scratch folder. Raises ConfigError if `keep` cannot be made, or is not
    empty: a run must not find the blocks of an earlier one.
    """
    if keep is not None:
        try:
            keep.mkdir(parents=True, exist_ok=True)
            is_used = any(keep.iterdir())
        except OSError as error:
            raise ConfigError(
                f"--keep {keep}: {error.strerror}; name a folder that can be written"
            ) from error
        if is_used:
            raise ConfigError(f"--keep {keep}: the folder is not empty; name another, or empty it")
    with scratch(Path(PRIVATE_PARENT)) as folder:
        yield (keep or folder).absolute()


def cpu_timed(work: Callable[[], Result], rounds: int) -> tuple[Result, float]:
    """Return the last result of `work`, and the median of this process's CPU seconds per round."""

    def timed() -> tuple[Result, float]:
        start_s = time.process_time()
        result = work()
        return result, time.process_time() - start_s

    runs = [timed() for _ in range(rounds)]
    return runs[-1][0], median_high(seconds for _, seconds in runs)


def print_rows(rows: Iterable[Row], steps: Steps) -> Iterator[Row]:
    """Yield rows and print each at once, for benches that take long."""
    for row in rows:
        about = [row.more[name] for name in ("source", "tokens") if name in row.more]
        steps.console.print(row.what, *about, report.number(row.value))
        yield row


@contextmanager
def rows_kept(
    found: Report, console: Console, json_target: str | None, also: Sequence[str]
) -> Iterator[None]:
    """Show a report at the end of the block, which adds its rows to the list `found.rows`.

    If the block raises, the rows until then are shown, and written to `FILE.part` instead of the
    file of `--json`, so that an earlier, complete report in FILE is kept.
    """
    try:
        yield
    except BaseException:
        if found.rows:
            part_of_run = msgspec.structs.replace(found, broken_off=True)
            report.show(console, part_of_run, also)
            if json_target:
                part = json_target if json_target == "-" else f"{json_target}.part"
                report.write(part_of_run, part)
                console.print(f"broken off; written until then: {part}", soft_wrap=True)
        raise
    report.show(console, found, also)


def finish(found: Report, target: str | None) -> int:
    """Write a report to `target`, if given; return 0 if every goal was met, else 1."""
    if target:
        report.write(found, target)
    return 0 if found.ok else 1
