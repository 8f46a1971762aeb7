"""Tiles of NVFP4 products, and the specialisations that are built: of linear layers and of grouped experts.

:mod:`kernels.linear.kernel` says what bounds a launch, and why parts follow from (N, K) alone.
"""

from typing import Any, NamedTuple

import triton

from kernels.build_spec import Build
from kernels.linear.finish_kernel import num_parts
from kernels.linear.nvfp4_kernel import operands

ENOUGH_PROGRAMS = 512  # about four a multiprocessor of an H200 or B200
LEAST_COLUMNS = 512  # of one part: under it a program's start costs more than its loads
ONLY = {"ptx": ("sm_90a",), "native": ("sm_100a", "sm_103a", "sm_120a")}


class Tile(NamedTuple):
    """Rows of the weight, rows of the activation and columns a step; warps; tiles in flight."""

    bn: int
    bt: int
    bk: int
    warps: int
    stages: int

    def constants(self, how: str, k: int) -> dict[str, Any]:
        """Of a kernel around :func:`kernels.linear.nvfp4_kernel.nvfp4_product`, of ``k`` columns."""
        sizes = {"BN": self.bn, "BT": self.bt, "BK": self.bk, "STAGES": self.stages}
        return {**sizes, "WHOLE": k % self.bk == 0, "WAY": how}

    def steps(self, columns: int) -> int:
        """Of a program that multiplies so many columns; the last may be a part of one."""
        return triton.cdiv(columns, self.bk)


# Instructions a weight in the compiled loop (sm_90, Triton 3.6): 3.2, 3.8, 4.2. At 4.26 TB/s the issue slots of an
# H200 allow 3.9. One warp on 64 rows needs 2.8, but then q_b has a single warp for each scheduler.
DECODE = Tile(64, 8, 128, 2, 6)
SMALL_BATCH = Tile(64, 16, 128, 2, 6)
BATCH = Tile(128, 64, 128, 4, 4)
# Block-scaled dots of sm_100 take 128 weight rows and 16 activation rows or more.
NATIVE_DECODE = Tile(128, 16, 256, 4, 4)
NATIVE_BATCH = Tile(128, 64, 256, 4, 3)


def tile_for(num_rows: int, native: bool) -> Tile:
    """Tile of a product with ``num_rows`` activation rows."""
    if native:
        return NATIVE_DECODE if num_rows <= 16 else NATIVE_BATCH
    return DECODE if num_rows <= 8 else SMALL_BATCH if num_rows <= 16 else BATCH


def parts_of(groups: int, n: int, k: int, bk: int) -> int:
    """Parts that K is cut into at decode, of ``groups`` matrices (n, k) and steps of ``bk`` columns."""
    return num_parts(groups * triton.cdiv(n, 64), k, bk, enough=ENOUGH_PROGRAMS, least=LEAST_COLUMNS)


def product_build(
    name: str,
    kernel: Any,
    tile: Tile,
    how: str,
    k: int,
    *,
    store: str,
    integers: tuple[str, ...] = (),
    constants: dict[str, Any],
    blocks: tuple[str, ...] = (),
) -> Build:
    """A specialisation of a kernel around ``nvfp4_product``, for the ahead-of-time build.

    Parameters
    ----------
    name : of the build, ``<op>/<what>/<model>``.
    how : ``"ptx"`` (codes unpacked in registers, int32 words) or ``"native"`` (block-scaled dots, bytes).
    k : columns of the weight.
    store : type of the output's pointer, such as ``"*fp32"``.
    integers : the kernel's own int32 arguments, before the strides that every product takes.
    constants : the kernel's own, beside the tile's.
    blocks : pointers to a launch's work, int32.
    """
    native = how == "native"
    pointers = operands("*u8" if native else "*i32", "*u8", "*u8", store)
    strides = ("N", "x_stride", "x_scale_stride", "w_stride", "w_scale_stride")
    numbers = dict.fromkeys((*integers, *strides, "steps"), "i32")
    return Build(
        name=name,
        kernel=kernel,
        signature=pointers | dict.fromkeys(blocks, "*i32") | numbers,
        constants=constants | tile.constants(how, k),
        aligned=(*pointers, *blocks[:2], *strides),
        options={"num_warps": tile.warps},
        native=("nvfp4",) if native else (),
        only=ONLY[how],
    )
