"""The architectures that kernels are built for, and what a native kernel must hold on each."""

import re
from dataclasses import dataclass, field

KB = 1024
TENSOR_MEMORY = 512  # columns a multiprocessor of sm_100 and sm_103; PTX ISA, tensor memory


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One GPU architecture.

    Attributes
    ----------
    name : ptxas's name.
    capability : Triton's number for it.
    shared_bytes : shared memory that one block may use; CUDA C++ Programming Guide, compute capabilities.
    native : narrow format -> pattern of a PTX instruction that multiplies it on tensor cores. A format that is
        missing has no such instruction there: it is widened in registers.
    demanded : formats whose absence fails the check; elsewhere it is only shown.
    """

    name: str
    capability: int
    shared_bytes: int
    native: dict[str, re.Pattern[str]] = field(default_factory=dict)
    demanded: tuple[str, ...] = ()

    @property
    def blackwell(self) -> bool:
        """Whether Triton compiles for it with its second ptxas."""
        return self.capability >= 100


_TCGEN05 = {
    "fp8": re.compile(r"tcgen05\.mma\S*kind::(f8f6f4|mxf8f6f4)\b"),
    "mxfp4": re.compile(r"tcgen05\.mma\S*kind::(mxf4|mxf4nvf4)\.block_scale\.scale_vec::2X"),
    "nvfp4": re.compile(r"tcgen05\.mma\S*kind::mxf4nvf4\b"),
}
_BLACKWELL = ("fp8", "mxfp4", "nvfp4")
ARCHITECTURES = {
    found.name: found
    for found in (
        Architecture(
            name="sm_90a",
            capability=90,
            shared_bytes=227 * KB,
            native={"fp8": re.compile(r"wgmma\.mma_async\S*\.e4m3\.e4m3")},
            demanded=("fp8",),
        ),
        Architecture(
            name="sm_100a",
            capability=100,
            shared_bytes=227 * KB,
            native=_TCGEN05,
            demanded=_BLACKWELL,
        ),
        Architecture(
            name="sm_103a",
            capability=103,
            shared_bytes=227 * KB,
            native=_TCGEN05,
            demanded=_BLACKWELL,
        ),
        Architecture(
            name="sm_120a",
            capability=120,
            shared_bytes=99 * KB,
            native={
                "fp8": re.compile(r"mma\.sync\S*\.e4m3\.e4m3"),
                "mxfp4": re.compile(r"mma\.sync\S*kind::mxf4(nvf4)?\.block_scale\.scale_vec::2X\S*\.ue8m0"),
                "nvfp4": re.compile(r"mma\.sync\S*kind::mxf4nvf4\.block_scale"),
            },
            demanded=_BLACKWELL,
        ),
    )
}
