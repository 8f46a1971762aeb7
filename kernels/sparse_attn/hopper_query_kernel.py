"""q of the Hopper attention kernel, one term, made of q_b's product by the two values groups: norm, RoPE, codes.

They have nothing else to do until the first probabilities, and registers for it. The bits are those of the kernel of
q_norm_rope_quantise: its order of sums, its roundings; only the clamp to 448 is left out, as the scale keeps codes
under it. Two terms took 9 to 22 us more than q's kernel and attention together (H200, 2026-12-02), and ptxas 12.8
spilled and gave wrong bits; with one term it gives these too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kernels.formats import device as fmt
from kernels.rmsnorm.row_kernel import inverse_root, onto_halves, squares
from kernels.sparse_attn.hopper_layouts_kernel import head_layout, head_rope_layout
from kernels.sparse_attn.hopper_softmax_kernel import arrive

HEADS = gl.constexpr(16)  # at once: a head lies in eight threads, 128 values in sixteen registers each


@gluon.jit
def _largest(x):
    """Largest magnitude of each head of [HEADS, n] FP32, no NaN: those are in the sum of squares too."""
    return gl.max(gl.abs(x), 1)


@gluon.jit
def _product(x, y):
    """Product of x and y, rounded before anything is added to it: this kernel is compiled with multiply-adds."""
    x, y = gl.broadcast(x, y)
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _rotated(x, cos_ptr, sin_ptr):
    """kernels.rope's ``rotated`` of [HEADS, 64] by a token's 32 pairs."""
    layout: gl.constexpr = x.type.layout
    even, odd = gl.split(x.reshape([HEADS, 32, 2]))
    pair = gl.arange(0, 32, gl.SliceLayout(0, even.type.layout))
    cos, sin = gl.load(cos_ptr + pair)[None, :], gl.load(sin_ptr + pair)[None, :]
    both = gl.join(_product(even, cos) - _product(odd, sin), _product(odd, cos) + _product(even, sin))
    return gl.convert_layout(both.reshape([HEADS, 64]), layout, assert_trivial=True)


@gluon.jit
def _sixteens(x):
    """Sums of squares of [HEADS, 128] FP32 by sixteen neighbours, as kernels.rmsnorm has them: [HEADS, 8]."""
    eights = squares(x.reshape([HEADS, 16, 8]), HEADS, 16)
    return gl.sum(eights.reshape([HEADS, 8, 2]), 2)


@gluon.jit
def _load_heads(q_ptr, left):
    """BF16 of HEADS heads: nope as [HEADS, 128] three times and [HEADS, 64], the last 128 values whole, rope."""
    wide: gl.constexpr = head_layout()
    half: gl.constexpr = head_rope_layout()
    head = gl.arange(0, HEADS, gl.SliceLayout(1, wide))[:, None]
    at = q_ptr + head * 512 + gl.arange(0, 128, gl.SliceLayout(0, wide))[None, :]
    head_half = gl.arange(0, HEADS, gl.SliceLayout(1, half))[:, None]
    at_half = q_ptr + head_half * 512 + gl.arange(0, 64, gl.SliceLayout(0, half))[None, :]
    q0 = gl.load(at, mask=head < left, other=0.0)
    q1 = gl.load(at + 128, mask=head < left, other=0.0)
    q2 = gl.load(at + 256, mask=head < left, other=0.0)
    q3 = gl.load(at + 384, mask=head < left, other=0.0)
    last = gl.load(at_half + 384, mask=head_half < left, other=0.0)
    rope = gl.load(at_half + 448, mask=head_half < left, other=0.0)
    return q0, q1, q2, q3, last, rope


@gluon.jit
def _stored(raw, by):
    """BF16 [HEADS, n] times FP32 [HEADS], after a BF16 store: FP32."""
    by = gl.convert_layout(by, gl.SliceLayout(1, raw.type.layout), assert_trivial=True)
    return (raw.to(gl.float32) * by[:, None]).to(gl.bfloat16).to(gl.float32)


@gluon.jit
def _put_nope(tile, scaled, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Codes of [HEADS, WIDTH] FP32 into heads FIRST and on of q's tile [1, 64, WIDTH / 2 words]."""
    codes = tile.index(0)._reinterpret(gl.float8e4nv, [64, WIDTH], gl.NVMMASharedLayout(WIDTH, 8, 2))
    codes.slice(FIRST, HEADS, 0).store(scaled.to(gl.float8e4nv))


@gluon.jit
def _put_heads(raw, cos_ptr, sin_ptr, eps, tiles, FIRST: gl.constexpr):
    """Norm, turn and quantise HEADS heads, from the FIRST of the tile's 64 on."""
    q0, q1, q2, q3, last, rope = raw
    q, q_rope, q_scales = tiles
    by_head: gl.constexpr = gl.SliceLayout(1, q0.type.layout)
    by_half: gl.constexpr = gl.SliceLayout(1, last.type.layout)
    x0, x1, x2, x3 = q0.to(gl.float32), q1.to(gl.float32), q2.to(gl.float32), q3.to(gl.float32)
    sums = (_sixteens(x0) + _sixteens(x2)) + (_sixteens(x1) + _sixteens(x3))
    inverse = inverse_root(gl.convert_layout(onto_halves(sums, HEADS, 8), by_head), 512, eps)
    top_last = gl.convert_layout(_largest(last.to(gl.float32)), by_head, assert_trivial=True)
    top = gl.maximum(gl.maximum(_largest(x0), _largest(x1)), gl.maximum(_largest(x2), top_last))
    # rounding keeps order: this is the largest of the rounded values
    amax = fmt.no_infinity((top * inverse).to(gl.bfloat16).to(gl.float32).to(gl.int32, bitcast=True))
    scale = fmt.power_of_two_scale(fmt.floored(amax, fmt.AMAX_FLOOR), 448.0)
    q_scales.slice(FIRST, HEADS, 0).store(scale)
    shrink = 1.0 / scale
    # a power of two: rounding to BF16 may follow it, but for subnormals, whose codes are zeros
    gain = inverse * shrink
    _put_nope(q[0], _stored(q0, gain), FIRST, 128)
    _put_nope(q[1], _stored(q1, gain), FIRST, 128)
    _put_nope(q[2], _stored(q2, gain), FIRST, 128)
    _put_nope(q[3], _stored(last, gain), FIRST, 64)
    turned = rope.to(gl.float32) * gl.convert_layout(inverse, by_half, assert_trivial=True)[:, None]
    turned = _rotated(turned, cos_ptr, sin_ptr).to(gl.bfloat16).to(gl.float32)
    shrink = gl.convert_layout(shrink, by_half, assert_trivial=True)[:, None]
    q_rope.slice(FIRST, HEADS, 0).store((turned * shrink).to(gl.bfloat16))


@gluon.jit
def make_q(source, left, query, WHICH: gl.constexpr):
    """Half of the tile's heads: the first 32 (WHICH 0) or the last; heads past ``left`` are made of zeros."""
    q_ptr, cos_ptr, sin_ptr, eps = source
    q_full, q, q_rope, q_scales = query
    first: gl.constexpr = 32 * WHICH
    here = _load_heads(q_ptr + first * 512, left - first)
    there = _load_heads(q_ptr + (first + HEADS) * 512, left - first - HEADS)
    _put_heads(here, cos_ptr, sin_ptr, eps, (q, q_rope, q_scales), first)
    _put_heads(there, cos_ptr, sin_ptr, eps, (q, q_rope, q_scales), first + HEADS)
    fence_async_shared()
    arrive(q_full)
