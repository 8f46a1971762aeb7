"""What both Hopper kernels do: hand-overs between warp groups, the online softmax in base 2, a split row's sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kernels.sparse_attn.hopper_layouts_kernel import FLOOR, LAZY, LN2, LOG2E, TINY

# of a group of 128 threads at a barrier; 128 by each_arrival.py, see :func:`arrive`
ARRIVALS = gl.constexpr(1)


@gluon.jit
def arrive(bar):
    """Arrive for a warp group: one thread, after a barrier of the group, which Triton puts there.

    racecheck does not follow a write over two barriers. For it (``ARRIVALS`` 128) every thread arrives by itself.
    """
    if ARRIVALS == 1:
        mbarrier.arrive(bar)
    else:
        async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def block_of(heads, num_keys):
    """Row (int64), first head of the tile, split, its first tile of 64 keys and its steps, of this program.

    A row's head tiles are neighbours: they run at once, and the later one finds the keys in L2 (H200, 2026-11-30,
    128 heads: 84.1 us against 87.1 with the tiles of all rows after one another).
    """
    head_tiles = (heads + 63) // 64
    row = (gl.program_id(0) // head_tiles).to(gl.int64)
    head_of_tile = gl.program_id(0) % head_tiles * 64
    split = gl.program_id(1)
    tiles = (num_keys + 63) // 64
    low = (split * tiles) // gl.num_programs(1)
    steps = ((split + 1) * tiles) // gl.num_programs(1) - low
    written = (split * (gl.num_programs(0) // head_tiles) + row) * heads + head_of_tile
    return row, head_of_tile, low, steps, written


@gluon.jit
def start_barriers(full, empty, p_full, p_empty, sums_full, STAGES: gl.constexpr, STORED: gl.constexpr):
    """Set up what both kernels wait for; a tile of keys is copied and, if ``STORED``, stored too.

    A fence and a barrier must follow.
    """
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=128 + ARRIVALS if STORED else 128)
        mbarrier.init(empty.index(stage), count=3 * ARRIVALS)
    for buffer in gl.static_range(2):
        mbarrier.init(p_full.index(buffer), count=ARRIVALS)
        mbarrier.init(p_empty.index(buffer), count=2 * ARRIVALS)
    mbarrier.init(sums_full, count=ARRIVALS)


@gluon.jit
def next_of(stage, phase, STAGES: gl.constexpr):
    """The stage after a stage, and its phase."""
    stage = stage + 1
    if stage == STAGES:
        stage = 0
        phase = phase ^ 1
    return stage, phase


@gluon.jit
def start_sums(layout: gl.constexpr):
    """Running maximum [64] and sums: a thread adds up its own columns and meets its neighbours at the end."""
    peak = gl.full([64], FLOOR, gl.float32, gl.SliceLayout(1, layout))
    return peak, gl.sum(gl.sum(gl.zeros([64, 64], gl.float32, layout).reshape([64, 8, 4, 2]), 3), 1)


@gluon.jit
def step_sums(dots, factor, factor_of_dots, peak, total):
    """One step: -> probabilities [64, 64] FP32, by what the sums so far shrink [64], maximum, sums."""
    of_total: gl.constexpr = total.type.layout
    highest = gl.ceil(gl.max(dots, 1) * factor)  # whole, so that p rounds as on the portable path
    highest = gl.where(highest > peak + LAZY, highest, peak)
    shrink = gl.exp2(peak - highest)
    weights = gl.exp2(dots * factor_of_dots - highest[:, None])
    kept = total * gl.convert_layout(shrink, gl.SliceLayout(1, of_total), assert_trivial=True)[:, None]
    return weights, shrink, highest, kept + gl.sum(gl.sum(weights.reshape([64, 8, 4, 2]), 3), 1)


@gluon.jit
def put_weights(p, shrinks, p_empty, weights, shrink, step):
    """Give P and shrink to the values groups' buffer, fenced; the arrival at ``p_full`` must follow."""
    buffer = step & 1
    mbarrier.wait(p_empty.index(buffer), ((step >> 1) & 1) ^ 1)
    p.index(buffer).store(weights.to(gl.bfloat16))
    shrinks.index(buffer).store(shrink)
    fence_async_shared()


@gluon.jit
def end_sums(peak, total, sums, sums_full, sinks_ptr, lse_ptr, lse_at, head_of_tile, heads_left):
    """Write the LSE (base 2 of a part, else natural) and hand the reciprocal sums to the values groups.

    A part's sum is without the sink. Which it is, the grid says, as in keys_kernel.py's finish_row.
    """
    partial = gl.num_programs(1) > 1
    by_head: gl.constexpr = peak.type.layout
    head = gl.arange(0, 64, by_head)
    own = head < heads_left
    total = gl.convert_layout(gl.sum(total, 1), by_head)
    some = gl.where(total < TINY, TINY, total)  # a NaN stays
    lse = gl.where(total == 0, float("-inf"), peak + gl.log2(some))
    sink = gl.load(sinks_ptr + head_of_tile + head, mask=own, other=0.0) * LOG2E
    gl.store(lse_ptr + lse_at + head, lse * gl.where(partial, 1.0, LN2), mask=own)
    sums.store(1.0 / (some + gl.where(partial, 0.0, gl.exp2(sink - peak))))
    arrive(sums_full)
