"""LLVM IR, and PTX, that sm_100a's compilation leaves to the other architectures: made once where it is the same.

Triton lowers a kernel to LLVM IR with the architecture in mind, but what it looks at is little: which tensor-core
instructions there are, and whether a warp can reduce FP32 in one instruction (sm_100 alone). Whatever :func:`common`
lets share was lowered for each architecture too and compared, byte for byte, for every Build there is (Triton 3.6.0,
2026-12-01: 99 on sm_90a, 172 on sm_103a, 99 on sm_120a, no difference); tests repeat it for a few. To repeat it for
all, build one architecture in a call of its own, where nothing is shared, and compare hashes.

Where sm_120a shares the LLVM IR it shares the PTX too, but for the name of the architecture (2026-12-02: all 99);
sm_103a's and sm_90a's often differ. Cubins are always an architecture's own.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kernels.build.architecture import Architecture

FIRST = "sm_100a"  # compiled before the others
COMPARED = ("3.6.0",)  # releases of Triton; with another, every architecture is compiled from the source on
_TENSOR_CORES = ("tt.dot", "tt.descriptor", "ttng.")  # in Triton's IR: lowered by family
_SAME_PTX = ("sm_120a",)
_ONE_WARP_REDUCTION = "llvm.nvvm.redux.sync.f"
# what lowering finds out besides the text
_FOUND = (
    "name",
    "num_warps",
    "shared",
    "tmem_size",
    "tensordesc_meta",
    "global_scratch_size",
    "global_scratch_align",
    "profile_scratch_size",
    "profile_scratch_align",
)


@dataclass(frozen=True)
class Lowered:
    """A kernel as LLVM IR, and all that it may be used for.

    Attributes
    ----------
    llir, ptx : the text; PTX of sm_100a.
    found : what Triton found out on the way, such as the bytes of shared memory.
    arches : architectures whose LLVM IR it is too.
    assembler : version of the ptxas that it was lowered for: Triton asks which PTX that one reads.
    """

    llir: str
    ptx: str
    found: Mapping[str, Any]
    arches: tuple[str, ...]
    assembler: str


@dataclass
class Kept:
    """What the compilations of one Build leave to those for other architectures that follow in the same process."""

    lowered: Lowered | None = None

    def fit(self, arch: Architecture) -> Lowered | None:
        """What there is for an architecture; None if it is compiled from the source on."""
        kept = self.lowered
        usable = kept and arch.name in kept.arches and kept.assembler == _assembler(arch)
        return kept if usable else None

    def add(self, arch: Architecture, made: Any, triton_version: str) -> None:
        """Keep what a compilation from the source on made, if others may use it."""
        if (
            arch.name == FIRST and triton_version in COMPARED and "ttir" in made.asm
        ):  # Gluon is of one architecture
            found = {name: getattr(made.metadata, name) for name in _FOUND if hasattr(made.metadata, name)}
            arches = common(made.asm["ttir"], made.asm["llir"])
            self.lowered = Lowered(made.asm["llir"], made.asm["ptx"], found, arches, _assembler(arch))


def _assembler(arch: Architecture) -> str:
    from triton import knobs

    return (knobs.nvidia.ptxas_blackwell if arch.blackwell else knobs.nvidia.ptxas).version


def common(ttir: str, llir: str) -> tuple[str, ...]:
    """Architectures whose LLVM IR of a kernel is sm_100a's."""
    if _ONE_WARP_REDUCTION in llir:
        return ()
    others = ("sm_120a", "sm_90a") if not any(name in ttir for name in _TENSOR_CORES) else ()
    return ("sm_103a", *others)


@contextmanager
def resumed(source: Any, lowered: Lowered, arch: Architecture) -> Iterator[Any]:
    """Yield a source object whose compilation, inside of the context, begins with LLVM IR or PTX that is there."""
    from triton import knobs

    def llvm(_: str, metadata: dict[str, Any]) -> str:
        metadata.update(lowered.found)
        return lowered.llir

    def skip(_backend: Any, stages: dict[str, Any], *_: Any) -> None:
        stages["ttir"] = stages["ttgir"] = lambda text, _: text
        stages["llir"] = llvm
        if arch.name in _SAME_PTX:
            stages["ptx"] = lambda *_: lowered.ptx.replace(f".target {FIRST}\n", f".target {arch.name}\n")

    later = copy.copy(source)
    later.make_ir = lambda *_: ""
    knobs.runtime.add_stages_inspection_hook = skip
    try:
        yield later
    finally:
        knobs.runtime.add_stages_inspection_hook = None
