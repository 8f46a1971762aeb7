"""NVFP4 products of up to 16 rows for Hopper, Gluon; the same meaning as nvfp4_kernel.py's, which is its fallback.

Written for Triton 3.6 (Gluon changes between versions) and built for sm_90 only; the interpreter does not run it.

A warp owns 16 rows of the weight and reads them from memory straight into the registers of operand A: no barrier and
no shared memory between a load and its product. What makes that possible is that the order of columns inside a
product is free, as long as both operands have it. A lane reads 32 bytes of a row, 64 columns, and the four scales
that belong to them, so that every load is a whole one. The activation's rows are unpacked once a block of programs
into shared memory; the portable kernel unpacks them again in every warp, which costs it a third at 16 rows.

An E2M1 code is an FP16 number but for the place of its bits: sign to bit 15, exponent and mantissa to bits 11 to 9
give value x 2^-14, subnormals included. Both operands carry 2^-14.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

UNDO = gl.constexpr(2.0**28)  # both operands carry 2^-14


def _unpack_four_words(high: bool) -> str:
    """PTX: words $16 to $19 and their E4M3 scales in $20 -> FP16 pairs $0 to $15.

    Four pairs a word: codes 0 and 4, 2 and 6, 1 and 5, 3 and 7.
    ``high``: which half of $20 holds the scales of words 0, 1 and of words 2, 3. Of the twelve instructions before the
    scale, eight are for the pipe of logic and right shifts, which takes a warp every other clock and is what bounds
    these kernels (nine: 955 us where eight take 919 us, MoE of 64 rows, H200, 2026-11-30); left shifts are issued to
    the multipliers.
    """
    lines = [".reg .b32 t, s, e, o, sa, sb, p;", ".reg .b16 lo, hi;", "mov.b32 {lo, hi}, $20;"]
    lines.append(f"cvt.rn.f16x2.e4m3x2 p, {'hi' if high else 'lo'};")
    lines += ["prmt.b32 sa, p, p, 0x1010;", "prmt.b32 sb, p, p, 0x3232;"]
    for word in range(4):
        w, pair = f"${16 + word}", [f"${4 * word + i}" for i in range(4)]
        lines += [
            f"shl.b32 t, {w}, 1;",
            "and.b32 t, t, 0x0E0E0E0E;",
            f"shl.b32 s, {w}, 4;",
            "lop3.b32 e, s, 0x80808080, t, 0xEA;",  # (s & mask) | t: high bytes of codes 0, 2, 4, 6
            f"prmt.b32 {pair[0]}, e, 0, 0x2404;",
            f"and.b32 {pair[1]}, e, 0xFF00FF00;",
            f"and.b32 o, {w}, 0xF0F0F0F0;",
            "shl.b32 s, o, 8;",
            "shl.b32 t, o, 5;",
            f"lop3.b32 {pair[2]}, s, t, 0x8E008E00, 0xA8;",  # (s | t) & mask
            "shr.u32 t, o, 3;",
            f"lop3.b32 {pair[3]}, o, t, 0x8E008E00, 0xA8;",
        ]
        lines += [f"mul.f16x2 {register}, {register}, {'sa' if word < 2 else 'sb'};" for register in pair]
    return "{\n" + "\n".join(lines) + "\n}"


UNPACK_LOW = gl.constexpr(_unpack_four_words(False))
UNPACK_HIGH = gl.constexpr(_unpack_four_words(True))
REGISTERS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 8))


@gluon.jit
def unpack(words, scales, HIGH: gl.constexpr):
    """Eight FP16 [R, C] of value x scale x 2^-14: int32 words [R, C] of eight codes; two scales for each four words.

    A lane has four neighbouring words, and their scales in the low (HIGH: high) half of int32 ``scales`` [R, C].
    """
    text: gl.constexpr = UNPACK_HIGH if HIGH else UNPACK_LOW
    return gl.inline_asm_elementwise(
        text, REGISTERS, [words, scales], dtype=(gl.float16,) * 8, is_pure=True, pack=4
    )


@gluon.constexpr_function
def _bits(count):
    return count.bit_length() - 1


@gluon.constexpr_function
def word_layout(WARPS):
    """Words [16 * WARPS, 16]: lane (g, q) has words 4q to 4q + 3 of rows g and g + 8 of its warp's 16."""
    warps = [[16 << i, 0] for i in range(_bits(WARPS))]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], lanes, warps, [], [16 * WARPS, 16])


@gluon.constexpr_function
def scale_layout(WARPS):
    """The same as [16 * WARPS, 4, 4]."""
    warps = [[16 << i, 0, 0] for i in range(_bits(WARPS))]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    registers = [[0, 0, 1], [0, 0, 2], [8, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [16 * WARPS, 4, 4])


@gluon.constexpr_function
def row_layout(WARPS, BT):
    """FP16 [BT, 16] as operand B's lanes want it: lane (g, q) has 4q to 4q + 3 of row g, every warp all rows."""
    registers = [[0, 1], [0, 2]] + [[8 << i, 0] for i in range(_bits(BT) - 3)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0]] * _bits(WARPS), [], [BT, 16])


@gluon.constexpr_function
def stage_layout(WARPS, ROWS, COLS):
    """Words [ROWS, COLS] -> threads, so that what a warp stores to shared memory is 256 bytes in a row."""
    order = [[0, 8], [0, 16]] + [[1 << i, 0] for i in range(_bits(ROWS))] + [[0, 4]]
    order += [[0, 32 << i] for i in range(_bits(COLS // 32))]
    threads = 5 + _bits(WARPS)
    registers = [[0, 1], [0, 2], *order[threads:]]
    order = order[:threads] + [[0, 0]] * (threads - len(order))
    return gl.DistributedLinearLayout(registers, order[:5], order[5:], [], [ROWS, COLS])


@gluon.jit
def _operand(values, R: gl.constexpr):
    """Rename columns: a lane's four neighbours become 2q, 2q + 1, 2q + 8, 2q + 9. No data moves."""
    return values.reshape([R, 4, 2, 2]).permute((0, 2, 1, 3)).reshape([R, 16])


@gluon.jit
def offsets(K: gl.constexpr, WARPS: gl.constexpr):
    """Of a lane's words and scales from the first ones of its block of rows, in int32 elements."""
    words: gl.constexpr = word_layout(WARPS)
    scales: gl.constexpr = gl.SliceLayout(2, scale_layout(WARPS))
    row = gl.arange(0, 16 * WARPS, gl.SliceLayout(1, words))
    col = gl.arange(0, 16, gl.SliceLayout(0, words))
    scale_row = gl.arange(0, 16 * WARPS, gl.SliceLayout(1, scales))
    quarter = gl.arange(0, 4, gl.SliceLayout(0, scales))
    word_at = row[:, None] * (K // 8) + (col // 4 * 8 + col % 4)[None, :]
    return word_at, scale_row[:, None] * (K // 64) + quarter[None, :]


@gluon.jit
def load_step(w_ptr, scale_ptr, at, step):
    """Words [N, 16] twice and scales [N, 4] of 256 columns."""
    word_at, scale_at = at
    first = gl.load(w_ptr + step * 32 + word_at, eviction_policy="evict_first")  # each is read once
    second = gl.load(w_ptr + step * 32 + word_at + 4, eviction_policy="evict_first")
    return first, second, gl.load(scale_ptr + step * 4 + scale_at)


@gluon.jit
def stage_rows(
    x_ptr,
    x_scale_ptr,
    row,
    held,
    x_stride,
    x_scale_stride,
    first,
    COLS: gl.constexpr,
    PADDED: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Unpack COLS words of each row from word ``first`` on into shared memory: eight FP16 [PADDED / 16, ROWS, 16].

    ``row``, ``held``: [ROWS] in the slice of :func:`stage_layout`. Strides in int32 words and pairs of scales.
    """
    layout: gl.constexpr = stage_layout(WARPS, ROWS, PADDED)
    col = gl.arange(0, PADDED, gl.SliceLayout(0, layout))
    inside = held[:, None] & (col < COLS)[None, :]
    words = gl.load(x_ptr + (row * x_stride)[:, None] + (first + col)[None, :], mask=inside, other=0)
    pair_at = (row * x_scale_stride)[:, None] + ((first + col) // 4)[None, :]
    scales = gl.load(x_scale_ptr + pair_at, mask=inside, other=0).to(gl.int32)
    return stage_words(words, scales, PADDED, ROWS)


@gluon.jit
def stage_words(words, scales, PADDED: gl.constexpr, ROWS: gl.constexpr):
    """The words [ROWS, PADDED] in :func:`stage_layout` and their pairs of scales, as :func:`stage_rows` leaves them."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    values = unpack(words, scales, False)
    staged = ()
    for j in gl.static_range(8):
        block = values[j].reshape([ROWS, PADDED // 32, 4, 2, 4]).permute((1, 3, 0, 2, 4))
        memory = gl.allocate_shared_memory(
            gl.float16, [PADDED // 16 * ROWS, 16], shared, block.reshape([PADDED // 16 * ROWS, 16])
        )
        view = memory._reinterpret(gl.float16, [PADDED // 16, ROWS, 16], shared)
        staged = staged + (view,)  # noqa: RUF005 (Gluon has no starred tuples)
    return staged


@gluon.jit
def _multiply(
    sums,
    words,
    scales,
    staged,
    at,
    HIGH: gl.constexpr,
    BT: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Products of 128 columns, added to two sums in turn: a product waits for the one before the last."""
    N: gl.constexpr = 16 * WARPS
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    spread = scales.expand_dims(2).broadcast_to([N, 4, 4]).reshape([N, 16])
    values = unpack(words, gl.convert_layout(spread, word_layout(WARPS)), HIGH)
    even, odd = sums
    for j in gl.static_range(8):
        x = staged[j].index(at).load(row_layout(WARPS, BT))
        if ROWS < BT:  # one row: all lanes read it, and all columns of the sum are alike
            x = x.broadcast_to([BT, 16])
        b = gl.convert_layout(_operand(x, BT).permute((1, 0)), gl.DotOperandLayout(1, mma, 2))
        a = gl.convert_layout(_operand(values[j], N), gl.DotOperandLayout(0, mma, 2))
        if j % 2 == 0:
            even = mma_v2(a, b, even)
        else:
            odd = mma_v2(a, b, odd)
    return even, odd


@gluon.jit
def _multiply_step(sums, loaded, staged, step, BT: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    first, second, scales = loaded
    sums = _multiply(sums, first, scales, staged, 2 * step, False, BT, ROWS, WARPS)
    return _multiply(sums, second, scales, staged, 2 * step + 1, True, BT, ROWS, WARPS)


@gluon.jit
def start(w_ptr, scale_ptr, K: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr):
    """A lane's places in a block's rows, and the first AHEAD steps from there, asked for."""
    at = offsets(K, WARPS)
    loaded = ()
    for step in gl.static_range(AHEAD):
        loaded = loaded + (load_step(w_ptr, scale_ptr, at, step),)  # noqa: RUF005 (Gluon has no starred tuples)
    return at, loaded


@gluon.jit
def rest(
    at,
    loaded,
    w_ptr,
    scale_ptr,
    x_ptr,
    x_scale_ptr,
    row,
    held,
    x_stride,
    x_scale_stride,
    first,
    COLS: gl.constexpr,
    AHEAD: gl.constexpr,
    BT: gl.constexpr,
    ROWS: gl.constexpr,
    PADDED: gl.constexpr,
    WARPS: gl.constexpr,
):
    """FP32 [16 * WARPS, BT]: what :func:`start` began, with the rows of :func:`stage_rows`."""
    staged = stage_rows(
        x_ptr, x_scale_ptr, row, held, x_stride, x_scale_stride, first, COLS, PADDED, ROWS, WARPS
    )
    return multiplied(at, loaded, staged, w_ptr, scale_ptr, COLS, AHEAD, BT, ROWS, WARPS)


@gluon.jit
def multiplied(
    at,
    loaded,
    staged,
    w_ptr,
    scale_ptr,
    COLS: gl.constexpr,
    AHEAD: gl.constexpr,
    BT: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The same with rows that this program's threads have just staged."""
    gl.thread_barrier()
    return _product(loaded, staged, w_ptr, scale_ptr, at, COLS // 32, AHEAD, BT, ROWS, WARPS)


@gluon.jit
def _product(
    loaded,
    staged,
    w_ptr,
    scale_ptr,
    at,
    STEPS: gl.constexpr,
    AHEAD: gl.constexpr,
    BT: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """FP32 [16 * WARPS, BT] over STEPS x 256 columns; ``loaded``: the first AHEAD steps, which divides STEPS."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    sums = (gl.zeros([16 * WARPS, BT], gl.float32, mma), gl.zeros([16 * WARPS, BT], gl.float32, mma))
    for turn in range(0, STEPS // AHEAD - 1):
        fresh = ()
        for i in gl.static_range(AHEAD):
            sums = _multiply_step(sums, loaded[i], staged, turn * AHEAD + i, BT, ROWS, WARPS)
            fresh = fresh + (load_step(w_ptr, scale_ptr, at, (turn + 1) * AHEAD + i),)  # noqa: RUF005
        loaded = fresh
    for i in gl.static_range(AHEAD):
        sums = _multiply_step(sums, loaded[i], staged, STEPS - AHEAD + i, BT, ROWS, WARPS)
    return (sums[0] + sums[1]) * UNDO
