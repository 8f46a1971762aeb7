"""Numbers and layouts of the Hopper attention kernel: how tiles lie in shared memory and products in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WORDS = gl.constexpr(288)  # BF16-sized words of a record's data: 224 of nope, 64 of rope
NOPE_WORDS = gl.constexpr(224)
SHIFT = gl.constexpr(1.152921504606847e18)  # 2^60: keeps value * 2^-120 * scale far from FP32's ends
UNSHIFT = gl.constexpr(8.673617379884035e-19)  # 2^-60
MASKED = gl.constexpr(-1e35)  # dwarfs scores times 2^60, and is finite after any head's factor
FLOOR = gl.constexpr(
    -1e4
)  # where the running maximum starts: a sane number, so that masked - it rounds to masked
LAZY = gl.constexpr(8.0)  # the sums are rescaled only when a maximum grows by more than 2^8
TINY = gl.constexpr(1e-37)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

# int16 = e4m3 of (d even, d odd) of one key; a 32-bit register = two keys -> two pairs of BF16, value * 2^-120
WIDEN = gl.constexpr("""{ .reg .b32 a, t, u, v;
 shl.b32 t, $2, 4; shl.b32 a, $2, 8; and.b32 a, a, 0x80008000;
 shr.b32 u, $2, 4; and.b32 v, $2, 0x80008000;
 lop3.b32 $0, t, 0x07f007f0, a, 0xEA; lop3.b32 $1, u, 0x07f007f0, v, 0xEA; }""")
# the same, times the two keys' scales: BF16 powers of two, exact
WIDEN_SCALED = gl.constexpr("""{ .reg .b32 a, t, u, v;
 shl.b32 t, $2, 4; shl.b32 a, $2, 8; and.b32 a, a, 0x80008000;
 shr.b32 u, $2, 4; and.b32 v, $2, 0x80008000;
 lop3.b32 t, t, 0x07f007f0, a, 0xEA; lop3.b32 u, u, 0x07f007f0, v, 0xEA;
 mul.rn.bf16x2 $0, t, $3; mul.rn.bf16x2 $1, u, $3; }""")


@gluon.constexpr_function
def tile_layout():
    """Rows of 64 words of 2 bytes: 128-byte swizzle."""
    return gl.NVMMASharedLayout(128, 16, 2)


@gluon.constexpr_function
def half_layout():
    """Rows of 32 words of 2 bytes: 64-byte swizzle."""
    return gl.NVMMASharedLayout(64, 16, 2)


@gluon.constexpr_function
def column_layout():
    """Values of 64 keys, so that a thread's columns 8 i + 2 q + {0, 1} are one conflict-free 16-byte load a four."""
    return gl.SharedLinearLayout([[1], [8], [2], [4], [16], [32]], [], 16)


@gluon.constexpr_function
def copy_layout():
    """Of a copy of [64, 64] words: 16 bytes a thread, 128 a row."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.constexpr_function
def half_copy_layout():
    """Of a copy of [64, 32] words."""
    return gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])


@gluon.constexpr_function
def head_layout():
    """Of [16 heads, 128 values]: 16 neighbours a thread, a head in eight threads."""
    return gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])


@gluon.constexpr_function
def head_rope_layout():
    """Of [16 heads, 64 values] in the same threads: 8 neighbours a thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.constexpr_function
def line_layout():
    """Of 64 values, one a thread."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.constexpr_function
def accumulator(depth):
    """Layout of a 64 x 64 product; wgmma's depth (16 for BF16, 32 for e4m3) is part of it."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, depth])


@gluon.constexpr_function
def half_accumulator(depth):
    """The same of a 64 x 32 product."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, depth])


@gluon.constexpr_function
def pairs_layout():
    """[32 pairs of d, 64 keys] as a transposing load of 16-bit units leaves them."""
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [0, 32]], lanes, [[8, 0], [16, 0]], [], [32, 64]
    )


@gluon.constexpr_function
def output_layout():
    """The same of a product's rows: [32 pairs of d, 64 heads, 2]."""
    registers = [[0, 0, 1], [0, 1, 0], [0, 8, 0], [0, 16, 0], [0, 32, 0]]
    lanes = [[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0, 0], [16, 0, 0]], [], [32, 64, 2])
