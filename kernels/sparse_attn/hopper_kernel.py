"""Attention with FP8 operands for Hopper, Gluon: B1 on sm_90, four warp groups of one block a multiprocessor.

The same meaning as fp8_kernel.py at head_dim 512, for slots in BF16-rope, BF16-PV calls; that file is the fallback.
Written for Triton 3.6 (Gluon changes between versions) and built for sm_90 only; the interpreter does not run it.

A block owns 64 heads of one row and one split of its keys, 64 keys a step:

==========  ==============================================================================================
group       work
==========  ==============================================================================================
scores      S = q_rope k_rope (BF16), then 14 e4m3 products; softmax in base 2; P (BF16) to shared memory
values 1,2  O^T += V^T P^T for nope groups 0-3, and for groups 4-6 and rope: V^T is read from the FP8 tile by a
            transposing load and turned into BF16 in the registers of operand A, value * 2^-120, by moving bits
producer    16-byte asynchronous copies of keys (zeros for no key) and scales into ``stages`` tiles
==========  ==============================================================================================

The groups are in hopper_scores_kernel.py (what B0 shares in hopper_softmax_kernel.py), hopper_values_kernel.py and
hopper_producer_kernel.py; tiles and barriers are here, the launch in hopper_launch_kernel.py. Two kernels: q is read
as codes, or made of q_b's product by the values groups before their first step (hopper_query_kernel.py, one term;
product.py has when).

Two records. Aligned: a token's scale times 2^60 multiplies its scores and joins P. Seven scales: each group's dots
are added under the keys' scales, and V^T is multiplied, in BF16 and exactly, by scale * 2^60 as it is turned. What
2^60 leaves of the range: a group's scale up to 2^67 (the exponent of scale * 2^60 stops there); a token's up to 2^40
(448 products of 448 * 448, times 2^60 and it, stay under FP32's 2^128, and so does P, up to 2^8, in BF16).

Who may touch what in shared memory, and the barrier that orders it (arrivals in brackets):

* key tiles, scales: producer -> all by ``full`` [128 of the copies; seven scales: 1 more, after a barrier of the
  producer's warps, for scales written by ordinary stores]; back by ``empty`` [3: each group after its last read,
  products complete]. wgmma reads what the generic proxy wrote: each reader fences after its wait.
* P, shrink: scores -> values by ``p_full`` [1: after a fence by every writing thread and a barrier of the group];
  back by ``p_empty`` [2: after all products of the step are complete]. Two buffers.
* q: copied and read by the scores group alone: wait for the copies, fence, barrier of the group. Or made: values ->
  scores by ``q_full`` [2: each group after a fence by every writing thread and a barrier of the group], once.
* reciprocal sums: scores -> values by ``sums_full`` [1], sent after the last S is complete, so no product of that
  group still reads a key tile. That last S (one step past the end) reads a tile that nobody writes; it is dropped.
* key tiles as output tiles: a values group arrives at ``done`` [2] after its own last product and transposing load
  and after ``sums_full``; past ``done`` nobody reads keys, and the producer's last copy was waited for by all. Each
  group then writes and reads tiles of its own stage (0 or 1) only, with its own barrier between.

compute-sanitizer on an H200 (2026-12-02): memcheck finds nothing, nor does racecheck with each thread's own arrival;
with one thread's it reports writes before reads where ``full`` and ``p_full`` order them, as it does for a kernel of
nothing but such a hand-over: docs/races.md and test_races.py. 1000 launches beside other work gave the same bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import allocate_shared_memory
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sparse_attn.hopper_layouts_kernel import (
    column_layout,
    half_layout,
    line_layout,
    tile_layout,
)
from kernels.sparse_attn.hopper_producer_kernel import producer_group
from kernels.sparse_attn.hopper_scores_kernel import scores_group
from kernels.sparse_attn.hopper_softmax_kernel import ARRIVALS, block_of, start_barriers
from kernels.sparse_attn.hopper_values_kernel import values_group


@gluon.jit
def _attend(
    source,
    keys_source,
    sinks_ptr,
    written_to,
    sizes,
    score_scale,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    TERMS: gl.constexpr,
    SEVEN: gl.constexpr,
    PRODUCT: gl.constexpr,
    PDL: gl.constexpr,
):
    """What both kernels do; ``source`` is codes, second term and scales of q, or with PRODUCT what q is made of."""
    data_ptr, scale_ptr, idx_ptr = keys_source
    out_ptr, lse_ptr = written_to
    page_units, heads, num_keys = sizes
    if PDL:
        gdc_launch_dependents()
    tile: gl.constexpr = tile_layout()
    half: gl.constexpr = half_layout()
    line: gl.constexpr = column_layout()
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    row, head_of_tile, low, steps, written = block_of(heads, num_keys)
    keys_left = num_keys - low * 64
    idx = idx_ptr + row * num_keys + low * 64
    # one allocation a tile: within one, the compiler puts barriers between copies into different stages
    k0 = allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)  # nope 0-127
    k1 = allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)  # 128-255
    k2 = allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)  # 256-383
    k_rope = allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)
    k3 = allocate_shared_memory(gl.bfloat16, [STAGES, 64, 32], half)  # 384-447
    keys = (k0, k1, k2, k_rope, k3)
    nope = (k0, k1, k2, k3)
    q0 = allocate_shared_memory(gl.bfloat16, [TERMS, 64, 64], tile)
    q1 = allocate_shared_memory(gl.bfloat16, [TERMS, 64, 64], tile)
    q2 = allocate_shared_memory(gl.bfloat16, [TERMS, 64, 64], tile)
    q3 = allocate_shared_memory(gl.bfloat16, [TERMS, 64, 32], half)
    q = (q0, q1, q2, q3)
    q_rope = allocate_shared_memory(gl.bfloat16, [64, 64], tile)
    p = allocate_shared_memory(gl.bfloat16, [2, 64, 64], tile)
    q_scales = allocate_shared_memory(gl.float32, [64], line)
    shrinks = allocate_shared_memory(gl.float32, [2, 64], line)
    sums = allocate_shared_memory(gl.float32, [64], line)
    factors = allocate_shared_memory(gl.float32, [STAGES, 64], line)
    dot_scales = (factors,)
    value_scales = (factors,)
    if SEVEN:
        s0 = allocate_shared_memory(gl.float32, [STAGES, 64], line)
        s1 = allocate_shared_memory(gl.float32, [STAGES, 64], line)
        s2 = allocate_shared_memory(gl.float32, [STAGES, 64], line)
        s3 = allocate_shared_memory(gl.float32, [STAGES, 64], line)
        s4 = allocate_shared_memory(gl.float32, [STAGES, 64], line)
        s5 = allocate_shared_memory(gl.float32, [STAGES, 64], line)
        s6 = allocate_shared_memory(gl.float32, [STAGES, 64], line)
        dot_scales = (s0, s1, s2, s3, s4, s5, s6)
        v0 = allocate_shared_memory(gl.int16, [STAGES, 64], line)
        v1 = allocate_shared_memory(gl.int16, [STAGES, 64], line)
        v2 = allocate_shared_memory(gl.int16, [STAGES, 64], line)
        v3 = allocate_shared_memory(gl.int16, [STAGES, 64], line)
        v4 = allocate_shared_memory(gl.int16, [STAGES, 64], line)
        v5 = allocate_shared_memory(gl.int16, [STAGES, 64], line)
        v6 = allocate_shared_memory(gl.int16, [STAGES, 64], line)
        value_scales = (v0, v1, v2, v3, v4, v5, v6)
    full = allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    p_full = allocate_shared_memory(gl.int64, [2, 1], barrier)
    p_empty = allocate_shared_memory(gl.int64, [2, 1], barrier)
    sums_full = allocate_shared_memory(gl.int64, [1], barrier)
    done = allocate_shared_memory(gl.int64, [1], barrier)
    q_full = allocate_shared_memory(gl.int64, [1], barrier)
    start_barriers(full, empty, p_full, p_empty, sums_full, STAGES, SEVEN)
    mbarrier.init(done, count=2 * ARRIVALS)
    if PRODUCT:
        mbarrier.init(q_full, count=2 * ARRIVALS)
    fence_async_shared()
    gl.thread_barrier()
    if PDL:  # measured: waiting for q alone, behind the first copies of keys, gains nothing over this
        gdc_wait()
    ahead = idx + gl.minimum(gl.arange(0, 128, line_layout()) * 32, keys_left - 1)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ahead], dtype=gl.int32, is_pure=False, pack=1
    )
    bars = (full, empty, p_full, p_empty, sums_full, done)
    first_head = row * heads + head_of_tile
    heads_left = heads - head_of_tile
    query = (q_full, q, q_rope, q_scales)
    if PRODUCT:
        q_ptr, cos_ptr, sin_ptr, q_stride, eps = source
        source = (q_ptr + row * q_stride + head_of_tile * 512, cos_ptr + row * 32, sin_ptr + row * 32, eps)
    out = out_ptr + written * 512
    # registers by group: scores get what is left; with fewer, values groups' products are serialised by ptxas, and the
    # producer's addresses go through local memory, whose loads wait behind its copies
    gl.warp_specialize(
        [
            (
                scores_group,
                (
                    (source, sinks_ptr, lse_ptr),
                    (written, first_head, head_of_tile, heads),
                    score_scale,
                    steps,
                    (keys, nope, query, p, shrinks, sums, factors, dot_scales),
                    bars,
                    STAGES,
                    TERMS,
                    SEVEN,
                    PRODUCT,
                ),
            ),
            (
                values_group,
                (
                    (source, out, heads_left),
                    steps,
                    (keys, query, p, shrinks, sums, value_scales),
                    bars,
                    0,
                    STAGES,
                    SEVEN,
                    PRODUCT,
                ),
            ),
            (
                values_group,
                (
                    (source, out, heads_left),
                    steps,
                    (keys, query, p, shrinks, sums, value_scales),
                    bars,
                    1,
                    STAGES,
                    SEVEN,
                    PRODUCT,
                ),
            ),
            (
                producer_group,
                (
                    (data_ptr, scale_ptr, idx),
                    keys_left,
                    page_units,
                    steps,
                    (keys, factors, dot_scales, value_scales),
                    bars,
                    STAGES,
                    PAGE,
                    SEVEN,
                ),
            ),
        ],
        [4, 4, 4],
        [176, 176, 40] if SEVEN else [192, 192, 40],
    )


@gluon.jit
def attend_hopper_kernel(
    q_ptr,
    residual_ptr,
    q_scale_ptr,
    data_ptr,
    scale_ptr,
    idx_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    page_units,
    heads,
    num_keys,
    score_scale,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    TERMS: gl.constexpr,
    SEVEN: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid (T * head tiles, splits), 4 warps. ``scale_ptr``: FP32 a token, or with SEVEN the pages as int64."""
    _attend(
        (q_ptr, residual_ptr, q_scale_ptr),
        (data_ptr, scale_ptr, idx_ptr),
        sinks_ptr,
        (out_ptr, lse_ptr),
        (page_units, heads, num_keys),
        score_scale,
        PAGE,
        STAGES,
        TERMS,
        SEVEN,
        False,
        PDL,
    )


@gluon.jit
def attend_product_hopper_kernel(
    q_ptr,
    cos_ptr,
    sin_ptr,
    data_ptr,
    scale_ptr,
    idx_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    q_stride,
    page_units,
    heads,
    num_keys,
    eps,
    score_scale,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    SEVEN: gl.constexpr,
    PDL: gl.constexpr,
):
    """The same, q of one term made here of q_b's product [T, heads, 512], BF16; ``cos_ptr``, ``sin_ptr`` [T, 32]."""
    _attend(
        (q_ptr, cos_ptr, sin_ptr, q_stride, eps),
        (data_ptr, scale_ptr, idx_ptr),
        sinks_ptr,
        (out_ptr, lse_ptr),
        (page_units, heads, num_keys),
        score_scale,
        PAGE,
        STAGES,
        1,
        SEVEN,
        True,
        PDL,
    )
