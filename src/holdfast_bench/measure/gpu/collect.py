"""Collect what `holdfast bench gpu` needs on a machine without a network.

Such a machine has Python, PyTorch for CUDA with Triton, and numpy, but perhaps none of the small
packages that Holdfast depends on.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import holdfast
import holdfast_bench
from holdfast.errors import ConfigError
from holdfast.limits import MIB
from holdfast_bench.measure.gpu.gpu_tests import TESTS_FOLDER, tests_on_gpu

BYTES_MAX = 64 * MIB
"""Largest size of the folder: often more cannot be taken to such a machine."""

PACKAGES = (
    "backports.zstd",
    "cffi",
    "cryptography",
    "markdown-it-py",
    "mdurl",
    "msgspec",
    "pycparser",
    "pygments",
    "pyyaml",
    "rich",
    "trustme",
    "idna",
    "xxhash",
)
"""Dependencies of Holdfast's commands, and theirs, without numpy."""

DISTRIBUTION = "holdfast-kv"

PLATFORMS = (
    "manylinux_2_34",
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_17",
    "manylinux2014",
)
PYTHON = "3.12"
PROCESSOR = "x86_64"
_VERSION = re.compile(r"3\.\d+")

SCRIPT = """\
#!/bin/sh
# Run `holdfast bench gpu` with what lies beside this file. Options are passed on; with
# --json FILE, the results are in FILE.part after each phase.
set -e
here=$(cd "$(dirname "$0")" && pwd)
if [ ! -d "$here/site" ]; then
    python3 -m pip install --quiet --no-index --no-deps --target "$here/site" "$here"/wheels/*.whl
fi
PYTHONPATH="$here/packages:$here/site${PYTHONPATH:+:$PYTHONPATH}" exec \\
    python3 -m holdfast bench gpu "$@"
"""


def collect(folder: Path, python: str = PYTHON, processor: str = PROCESSOR) -> int:
    """Fill a new or empty folder; return its bytes.

    Raises ConfigError for another version than 3.N, if the folder is not empty or cannot be made,
    if pip cannot get the packages, and if they have more than `BYTES_MAX`.
    """
    if not _VERSION.fullmatch(python):
        raise ConfigError(f"--python: {python!r} is not a version such as {PYTHON}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--collect {folder}: cannot be made: {error.strerror}; name a new folder"
        ) from error
    if any(folder.iterdir()):
        raise ConfigError(f"--collect {folder}: the folder is not empty; name a new one")
    _download(folder / "wheels", python, processor)
    for package in (holdfast, holdfast_bench):
        source = Path(str(package.__file__)).parent
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, folder / "packages" / source.name, ignore=ignored)
    _declare(folder / "packages")
    for file in tests_on_gpu(TESTS_FOLDER):
        to = folder / "tests" / file.relative_to(TESTS_FOLDER)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to)
    script = folder / "bench-gpu"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if nbytes > BYTES_MAX:
        raise ConfigError(f"--collect {folder}: {nbytes} bytes are more than {BYTES_MAX}")
    return nbytes


def _declare(packages: Path) -> None:
    """Write what an installation records of Holdfast: `holdfast` finds the verb `bench` there."""
    installed = metadata.distribution(DISTRIBUTION)
    folder = packages / f"{DISTRIBUTION.replace('-', '_')}-{installed.version}.dist-info"
    folder.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (folder / name).write_text(str(installed.read_text(name)))


def _download(folder: Path, python: str, processor: str) -> None:
    """Download wheels for a version of Python and a processor, from the configured index."""
    platforms = [f"--platform={name}_{processor}" for name in PLATFORMS]
    argv = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms),
        *("--dest", str(folder), *PACKAGES),
    ]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ConfigError(f"pip cannot get the packages: {ended.stderr.strip()[-500:]}")
