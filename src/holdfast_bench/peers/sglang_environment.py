"""SGLang in a virtual environment of its own, as its tests and its bench use it, on a CPU.

SGLang requires other versions of many packages than vLLM, and declares packages that exist for CUDA
only. So it is installed beside the project, in a folder that is kept between runs (3 GB), without
the packages of `LEFT_OUT`. What SGLang imports of them is in `sglang_on_cpu`.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import holdfast
import holdfast_bench
from holdfast.errors import HoldfastError

VERSION = "0.5.23"
"""The version of SGLang with which the binding is tested."""

TORCH = "torch==2.13.0+cpu"
"""The version that SGLang requires, as its CPU build; pip finds it, see requirements/torch.txt."""

LEFT_OUT = (
    *("cuda-python", "datasets", "flash-attn-4", "flashinfer-python", "humming-kernels"),
    *("modelscope", "nvidia-cutlass-dsl", "nvidia-mathdx", "nvshmem4py-cu13", "py-spy"),
    *("quack-kernels", "sgl-deep-ep", "sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel"),
    *("tilelang", "timm", "torch-memory-saver", "torchaudio", "torchcodec"),
    "torchvision",
)
"""Required packages that exist for CUDA only, or that serving text on a CPU never imports."""

ALSO = ("dill", "torchao", "cryptography", "msgspec", "numpy", "pyyaml", "xxhash", "backports-zstd")
"""Packages that SGLang imports without requiring them, and those that Holdfast requires."""

VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # the other one needs a Rust toolchain
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

NEW_TOKENS_ONLY = {"HOLDFAST_SGLANG_NEW_TOKENS_ONLY": "1"}
"""Variables of a server whose attention computes the new tokens of a prompt only, see
`sglang_on_cpu`. Without them it computes all tokens and discards most results.
"""

INSTALL_S = 1800.0
"""Maximum duration of one installation step."""

WHY_NOT = "SGLang is not installed; `make sglang` installs it in {folder} (3 GB)"

_DONE = "holdfast-installed"
"""File that marks a complete environment; it contains what was installed."""


def folder() -> Path:
    """Return the folder of the environment, which may not exist."""
    return Path.home() / ".cache" / "holdfast" / "engines" / f"sglang-{VERSION}"


def installed() -> bool:
    """Whether the environment is complete."""
    try:
        return (folder() / _DONE).read_text() == _wanted()
    except OSError:
        return False


def python() -> str:
    """Return the path of its Python; raise HoldfastError if the environment is not complete."""
    if not installed():
        raise HoldfastError(WHY_NOT.format(folder=folder()))
    return str(folder() / "bin" / "python")


def variables(scratch: Path) -> dict[str, str]:
    """Return variables of a process of its Python, which has no Holdfast of its own.

    `scratch` receives a folder with links to the packages of this process.
    """
    packages = scratch / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    for package in (holdfast, holdfast_bench):
        place = Path(str(package.__file__)).parent
        link = packages / place.name
        link.unlink(missing_ok=True)
        link.symlink_to(place)
    spec = find_spec("holdfast_bench.peers.sglang_on_cpu.sitecustomize")
    if spec is None or spec.origin is None:
        raise HoldfastError("holdfast_bench lacks its replacements for CUDA; install it again")
    shims = Path(spec.origin).parent
    return VARIABLES | {"PYTHONPATH": f"{shims}{os.pathsep}{packages}"}


def install() -> None:
    """Make the environment complete, in minutes; other processes wait meanwhile.

    Raises HoldfastError with the end of the output of a step that fails.
    """
    place = folder()
    place.mkdir(parents=True, exist_ok=True)
    with (place.parent / f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if installed():
            return
        (place / _DONE).unlink(missing_ok=True)
        for argv in _steps(place):
            _run(argv)
        (place / _DONE).write_text(_wanted())


def _steps(place: Path) -> list[list[str]]:
    inside = str(place / "bin" / "python")
    overrides = place / "overrides.txt"
    overrides.write_text(
        "\n".join([TORCH, *(f'{name} ; python_version < "3"' for name in LEFT_OUT), ""])
    )
    uv = [str(place / "bin" / "uv"), "pip", "install", "--python", inside]
    return [
        [sys.executable, "-m", "venv", str(place)],
        [inside, "-m", "pip", "install", "-U", "pip", "uv"],
        [inside, "-m", "pip", "install", TORCH],
        [*uv, "--prerelease=allow", "--overrides", str(overrides), f"sglang=={VERSION}", *ALSO],
        [*uv, "--no-deps", "torchvision"],
    ]


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=INSTALL_S,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},  # compiled once and kept
    )
    if done.returncode:
        end = "\n".join(done.stdout.decode(errors="replace").splitlines()[-20:])
        raise HoldfastError(f"installing SGLang failed with {' '.join(argv)}:\n{end}")


def _wanted() -> str:
    return "\n".join([VERSION, TORCH, *LEFT_OUT, *ALSO])


if __name__ == "__main__":
    install()
