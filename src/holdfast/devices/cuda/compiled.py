"""Kernels compiled for one GPU, as machine code that the driver loads and launches by itself.

A launch through Triton parses and specialises its arguments in Python, 20 to 40 us each time; a
kernel that is compiled once for fixed sizes is launched by one call of the driver. Compiling needs
no GPU, so it is tested without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from holdfast.devices.cuda.kernels import LAYERS_PER_JOB, convert_pages, copy_pages, pause
from holdfast.devices.cuda.libcuda import WARPS
from holdfast.devices.driver import PageConversion, PageCopy

CHUNK_WORDS = 1024
"""Words that one program has in flight: 8 for each of its threads."""

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}


class CopyVariant(NamedTuple):
    """`copy_pages` for pages of one size; `aligned_bytes` divides every address of a page."""

    page_bytes: int
    aligned_bytes: int
    to_pages: bool

    def kernel(self) -> tuple[Any, dict[str, Any], tuple[str, ...]]:
        """Return the kernel, its constants, and the types of its arguments in their order."""
        word = min(8, self.aligned_bytes)
        words = self.page_bytes // word
        constants = {
            "PAGE_WORDS": words,
            "WORD": _WORDS[word],
            "ALIGN": self.aligned_bytes,
            "CHUNK": min(CHUNK_WORDS, triton.next_power_of_2(words)),
            "JOB_LAYERS": LAYERS_PER_JOB,
            "TO_PAGES": self.to_pages,
        }
        return copy_pages, constants, COPY_ARGUMENTS


class ConvertVariant(NamedTuple):
    """`convert_pages` for pages of some tokens and heads of one size."""

    tokens: int
    head_bytes: int
    aligned_bytes: int
    to_pages: bool

    def kernel(self) -> tuple[Any, dict[str, Any], tuple[str, ...]]:
        """Return the kernel, its constants, and the types of its arguments in their order."""
        word = min(8, self.aligned_bytes)
        words = self.head_bytes // word
        constants = {
            "WORD": _WORDS[word],
            "ALIGN": self.aligned_bytes,
            "ALIGN_WORDS": self.aligned_bytes // word,
            "TOKENS": self.tokens,
            "TOKENS_POW2": triton.next_power_of_2(self.tokens),
            "HEAD_WORDS": words,
            "HEAD_POW2": triton.next_power_of_2(words),
            "TO_PAGES": self.to_pages,
        }
        return convert_pages, constants, CONVERT_ARGUMENTS


class PauseVariant(NamedTuple):
    """`pause`, which has no variants."""

    def kernel(self) -> tuple[Any, dict[str, Any], tuple[str, ...]]:
        """Return the kernel, its constants, and the types of its arguments in their order."""
        return pause, {}, ("*i32",)


def copy_arguments(work: PageCopy) -> tuple[int, ...]:
    """Return the numbers of a launch of `copy_pages`, after its three addresses."""
    layers = work.layers or work.table.layers
    jobs_per_page = -(-layers // LAYERS_PER_JOB)
    word = min(8, work.table.aligned_bytes)
    sizes = (work.block_bytes // word, work.table.stride_bytes // word)
    jobs = work.entries * jobs_per_page
    return jobs, layers, jobs_per_page, work.pages_per_block, *sizes


def convert_arguments(work: PageConversion) -> tuple[int, ...]:
    """Return the numbers of a launch of `convert_pages`, after its three addresses."""
    matrices = work.layers or work.table.layers
    aligned = work.table.aligned_bytes
    word = min(8, aligned)
    return (
        work.entries * matrices * work.heads,
        matrices,
        work.heads,
        work.pages_per_block,
        work.table.stride_bytes // word,
        work.token_stride_bytes // aligned,
        work.head_stride_bytes // word,
        work.block_bytes // word,
        work.matrix_bytes // word,
        0,
    )


def variant_of(work: PageCopy | PageConversion) -> CopyVariant | ConvertVariant:
    """Return the kernel for a launch."""
    aligned = work.table.aligned_bytes
    if isinstance(work, PageCopy):
        return CopyVariant(work.table.page_bytes, aligned, work.to_pages)
    return ConvertVariant(work.tokens, work.head_bytes, aligned, work.to_pages)


def arguments_of(work: PageCopy | PageConversion) -> tuple[int, ...]:
    """Return the numbers of a launch, after its three addresses."""
    return copy_arguments(work) if isinstance(work, PageCopy) else convert_arguments(work)


COPY_ARGUMENTS = ("*i64", "*i32", "*i64", "i32", "i32", "i32", "i32", "i64", "i64")
CONVERT_ARGUMENTS = ("*i64", "*i32", "*i64", *["i32"] * 4, *["i64"] * 5, "i32")


Variant: TypeAlias = CopyVariant | ConvertVariant | PauseVariant


def compiled(variant: Variant, target: Any, warps: int = WARPS) -> Any:
    """Return Triton's compiled kernel for a `GPUTarget`: `asm` has its code, `metadata` its name.

    `warps`: those of a program. The stage's address is a multiple of 16 if the variant's alignment
    is.
    """
    function, constants, types = variant.kernel()
    names = list(function.arg_names)[: len(types)]
    signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(function, signature, constants, {})
    return triton.compile(source, target=target, options={"num_warps": warps})


class MachineCode(NamedTuple):
    """A kernel as a driver loads it: code, name, threads of a program, and its parameters.

    `parameters` has the type of each, `uint64`, `int32` or `int64`. Triton adds addresses of
    scratch memory behind those of the kernel, which is not used: they are 0.
    """

    code: bytes
    name: str
    threads: int
    shared_bytes: int
    parameters: Sequence[str]


def for_nvidia(variant: Variant, major: int, minor: int, warps: int = WARPS) -> MachineCode:
    """Compile a kernel for NVIDIA GPUs of one compute capability."""
    made = compiled(variant, GPUTarget("cuda", 10 * major + minor, 32), warps)
    *_, types = variant.kernel()
    declared = made.asm["ptx"].split(".entry", 1)[1].split(")", 1)[0].count(".param")
    parameters = [_PARAMETERS[kind] for kind in types]
    parameters += ["uint64"] * (declared - len(parameters))
    metadata = made.metadata
    shared = int(metadata.shared)
    return MachineCode(made.asm["cubin"], metadata.name, 32 * warps, shared, parameters)


_PARAMETERS = {"*i64": "uint64", "*i32": "uint64", "i32": "int32", "i64": "int64"}
