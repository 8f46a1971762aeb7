"""mHC's partial sums of hundreds of rows on Hopper, Gluon; the bits of :mod:`kernels.hc.hopper_kernel`.

There a block owns rows and cuts the weights of every step anew; here it owns columns, cuts their weights into BF16
terms once, which stay in shared memory, and walks the rows. Nothing then stands between a step's streams and its
products but their arrival: no barrier, no fence, and most or all of a block's streams are under way from the start.
It pays while the partial sums are few against the streams: not for thousands of rows.

Streams come by TMA, a step of 64 columns and BLOCK_T rows a stage. What orders the memory: terms are written before
the block's one fence and barrier, and never again; a stage is filled again only after a barrier that all warps reach
with that segment's streams in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.hc.hopper_kernel import multiply, row_squares, store_sums, store_terms


@gluon.jit
def _fill(
    streams,
    staged,
    full,
    number,
    first_row,
    first,
    STEPS: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copy the streams of step ``number`` of a block: STEPS steps a tile of BLOCK_T rows."""
    stage = number % STAGES
    mbarrier.expect(full.index(stage), BLOCK_T * 64 * 2)
    at = [first_row + (number // STEPS) * BLOCK_T, first + (number % STEPS) * 64]
    tma.async_copy_global_to_shared(streams, at, full.index(stage), staged.index(stage))


@gluon.jit
def _cut_weights(fn_ptr, terms, first, K, OUTPUTS: gl.constexpr, STEPS: gl.constexpr, WARPS: gl.constexpr):
    """Terms of all steps, whose weights are all loaded before any is cut: by segments 14.7 us, so 13.5 (512 rows)."""
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    output = gl.arange(0, 32, gl.SliceLayout(1, plain))
    column = gl.arange(0, 64, gl.SliceLayout(0, plain))
    loaded = ()
    for step in gl.static_range(STEPS):
        k = first + step * 64 + column
        at = fn_ptr + output[:, None] * K + k[None, :]
        there = (output < OUTPUTS)[:, None] & (k < K)[None, :]
        loaded = loaded + (gl.load(at, there, other=0.0),)  # noqa: RUF005 (Gluon has no starred tuples)
    for step in gl.static_range(STEPS):
        store_terms(loaded[step], terms, step)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _segment(
    staged,
    full,
    terms,
    segment,
    stage,
    phase,
    zeros,
    no_squares,
    operand: gl.constexpr,
    SEGMENT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Products and squares of a segment with its streams in registers, and the stage and phase after it."""
    part = warpgroup_mma_init(zeros)
    square = no_squares
    held = ()  # streams that the tensor cores still read
    for step in gl.static_range(SEGMENT):
        mbarrier.wait(full.index(stage), phase)
        x = staged.index(stage).load(operand)
        part = multiply(x, terms, segment * SEGMENT + step, part)
        square += row_squares(x)
        held = held + (x,)  # noqa: RUF005
        stage += 1
        if stage == STAGES:
            stage = 0
            phase = phase ^ 1
    found = warpgroup_mma_wait(0, deps=(part,) + held)  # noqa: RUF005
    return found[0], square, stage, phase


@gluon.jit
def _refill(
    streams,
    staged,
    full,
    done,
    steps,
    first_row,
    first,
    SEGMENT: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copy the streams of STAGES steps ahead of a segment that began at step ``done``, which all warps have read."""
    if done + STAGES < steps:
        gl.thread_barrier()
        for step in gl.static_range(SEGMENT):
            if done + step + STAGES < steps:
                _fill(streams, staged, full, done + step + STAGES, first_row, first, STEPS, BLOCK_T, STAGES)


@gluon.jit
def partial_columns_kernel(
    streams,
    fn_ptr,
    part_ptr,
    num_rows,
    K,
    tiles,
    OUTPUTS: gl.constexpr,
    SEGMENT: gl.constexpr,
    SEGMENTS: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Sums of SEGMENTS segments, one or a chain of four, for ``tiles`` x BLOCK_T rows: part [split, T, 32]."""
    WARPS: gl.constexpr = BLOCK_T // 16
    STEPS: gl.constexpr = SEGMENT * SEGMENTS
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 32, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator, 2)
    staged = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_T, 64], swizzled)
    terms = gl.allocate_shared_memory(gl.bfloat16, [3 * STEPS, 32, 64], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first_row = gl.program_id(0) * (tiles * BLOCK_T)
    first = gl.program_id(1) * (STEPS * 64)
    tiles = gl.minimum(tiles, (num_rows - first_row + BLOCK_T - 1) // BLOCK_T)
    steps = tiles * STEPS
    for number in gl.static_range(STAGES):
        if number < steps:
            _fill(streams, staged, full, number, first_row, first, STEPS, BLOCK_T, STAGES)
    _cut_weights(fn_ptr, terms, first, K, OUTPUTS, STEPS, WARPS)

    zeros = gl.zeros([BLOCK_T, 32], gl.float32, accumulator)
    no_squares = gl.zeros([BLOCK_T], gl.float32, gl.SliceLayout(1, operand))
    part_ptr += gl.program_id(1).to(gl.int64) * num_rows * 32
    stage = 0
    phase = 0
    done = 0
    for tile in range(tiles):
        total = zeros
        total_square = no_squares
        for segment in range(SEGMENTS):
            part, square, stage, phase = _segment(
                staged, full, terms, segment, stage, phase, zeros, no_squares, operand, SEGMENT, STAGES
            )
            total += part
            total_square += square
            _refill(streams, staged, full, done, steps, first_row, first, SEGMENT, STEPS, BLOCK_T, STAGES)
            done += SEGMENT
        store_sums(part_ptr, total, total_square, first_row + tile * BLOCK_T, num_rows, operand, OUTPUTS)
