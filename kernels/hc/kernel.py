"""mHC, Triton; the contracts are in :mod:`kernels.hc.ref`. Four streams, as every released model has.

``mix`` is two launches at any number of rows: partial sums, then what makes weights of them
(:mod:`kernels.hc.weights_kernel`).
"""

import torch
import triton
from torch import Tensor

from kernels.arguments import check, check_option
from kernels.formats.device import EXACT
from kernels.hc.builds import builds
from kernels.hc.ref import Mix
from kernels.hc.streams_kernel import collapse_kernel, expand_kernel
from kernels.hc.weights_kernel import STREAMS, Path, partial_sums, weights
from kernels.rmsnorm.kernel import FLOATS

__all__ = ["builds", "collapse", "expand", "head_collapse", "mix", "partial_sums"]
F32 = torch.float32


def mix(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    out: Mix | None = None,
    part: Tensor | None = None,
    path: Path | None = None,
) -> Mix:
    """Mixing weights of a site; see :func:`kernels.hc.ref.mix`.

    Parameters
    ----------
    streams : (T, 4, D) BF16 or FP32
        The streams of a token are contiguous; tokens may be strided.
    fn : (24, 4 D), base : (24,), scale : (3,), FP32, contiguous
    norm_eps, hc_eps : float
    iterations : int
        At least 1.
    out : Mix, contiguous, optional
    part : what :func:`kernels.hc.weights_kernel.partial_sums` gives, optional
        Memory for the sums between the two launches.
    path : "hopper", "portable" or None
        None: the Hopper kernel where it can run, which :func:`kernels.hc.hopper_kernel.why_not` tells. Each has an
        order of its sums, which does not depend on the number of rows.

    Returns
    -------
    Mix
        A logit is off by at most 64 * 2^-24 of its terms' sum of magnitudes; pre by as much, post by twice, comb by
        four times that, and 64 * 2^-24. Seen on gaussian streams of 4096: 2^-22, 2^-22 and 2^-20 of a value.

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit; ``iterations`` is under 1.
    """
    if iterations < 1:
        raise ValueError(f"hc_mix: iterations = {iterations}; comb needs at least its columns' pass")
    T, _ = _check_streams("hc_mix", streams)
    _check_weights("hc_mix", streams, fn, base, scale, STREAMS * (STREAMS + 2), 3)
    if out is None:
        shapes = ((T, STREAMS), (T, STREAMS), (T, STREAMS, STREAMS))
        out = Mix(*(torch.empty(shape, dtype=F32, device=streams.device) for shape in shapes))
    check(
        "hc_mix",
        dense=["pre", "post", "comb"],
        device=streams.device,
        pre=(out.pre, f"{T} 4", F32),
        post=(out.post, f"{T} 4", F32),
        comb=(out.comb, f"{T} 4 4", F32),
    )
    weights(streams, fn, base, scale, out, part, norm_eps, hc_eps, iterations, path)
    return out


def head_collapse(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Final collapse before the last norm, three launches; see :func:`kernels.hc.ref.head_collapse`.

    Parameters
    ----------
    streams : (T, 4, D) BF16 or FP32
    fn : (4, 4 D), base : (4,), scale : (1,), FP32, contiguous
    norm_eps, hc_eps : float
    dtype : torch.dtype
        BF16 or FP32: how the result is stored.

    Returns
    -------
    (T, D) of ``dtype``

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit.
    """
    T, _ = _check_streams("hc_head_collapse", streams)
    check_option("hc_head_collapse", FLOATS, dtype=dtype)
    _check_weights("hc_head_collapse", streams, fn, base, scale, STREAMS, 1)
    pre = torch.empty(T, STREAMS, dtype=F32, device=streams.device)
    weights(streams, fn, base, scale, Mix(pre, pre, pre), None, norm_eps, hc_eps, 0)
    return collapse(streams, pre, dtype=dtype)


def collapse(
    streams: Tensor, pre: Tensor, *, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """Block input ``sum_j pre_j X_j``; see :func:`kernels.hc.ref.collapse`.

    Parameters
    ----------
    streams : (T, 4, D) BF16 or FP32
    pre : (T, 4) FP32, contiguous
    dtype : torch.dtype
        BF16 or FP32: how the result is stored, if ``out`` is not given.
    out : (T, D) contiguous, optional

    Returns
    -------
    (T, D) of ``dtype``

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit.
    """
    T, D = _check_streams("hc_collapse", streams)
    check_option("hc_collapse", FLOATS, dtype=dtype)
    check(
        "hc_collapse",
        dense=["pre", "out"],
        device=streams.device,
        pre=(pre, f"{T} 4", F32),
        out=(out, f"{T} {D}", FLOATS),
    )
    x = torch.empty(T, D, dtype=dtype, device=streams.device) if out is None else out
    if T and D:
        rows, block = 1, min(2048, triton.next_power_of_2(D))
        grid = (triton.cdiv(T, rows), triton.cdiv(D, block))
        collapse_kernel[grid](
            streams, pre, x, streams.stride(0), T, D, ROWS=rows, BLOCK_D=block, num_warps=8, **EXACT
        )
    return x


def expand(
    streams: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Next streams ``X'_k = post_k y + sum_j comb[j, k] X_j``; see :func:`kernels.hc.ref.expand`.

    Parameters
    ----------
    streams : (T, 4, D), y : (T, D), BF16 or FP32
        Rows of y and tokens of the streams may be strided.
    post : (T, 4), comb : (T, 4, 4), FP32, contiguous
    dtype : torch.dtype
        BF16 or FP32: how the residual is stored, if ``out`` is not given.
    out : (T, 4, D) contiguous, optional
        May be ``streams``: a program reads what it writes before.

    Returns
    -------
    (T, 4, D) of ``dtype``

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit.
    """
    T, D = _check_streams("hc_expand", streams)
    check_option("hc_expand", FLOATS, dtype=dtype)
    check(
        "hc_expand",
        dense=["post", "comb", "out"],
        device=streams.device,
        y=(y, f"{T} {D}", FLOATS),
        post=(post, f"{T} 4", F32),
        comb=(comb, f"{T} 4 4", F32),
        out=(out, f"{T} 4 {D}", FLOATS),
    )
    new = torch.empty(T, STREAMS, D, dtype=dtype, device=streams.device) if out is None else out
    if T and D:
        block = min(1024, triton.next_power_of_2(D))
        expand_kernel[(T, triton.cdiv(D, block))](
            streams,
            y,
            post,
            comb,
            new,
            streams.stride(0),
            y.stride(0),
            D,
            BLOCK_D=block,
            num_warps=4,
            **EXACT,
        )
    return new


def _check_streams(op: str, streams: Tensor) -> tuple[int, int]:
    """T and D of streams whose four rows lie one after the other."""
    sizes = check(op, streams=(streams, "T 4 D", FLOATS))
    if streams.numel() and streams.stride(1) != sizes["D"]:
        shape, strides = tuple(streams.shape), streams.stride()
        raise ValueError(f"{op}: streams of shape {shape} and strides {strides}: a token is not contiguous")
    return sizes["T"], sizes["D"]


def _check_weights(
    op: str, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, outputs: int, scales: int
) -> None:
    check(
        op,
        dense=["fn", "base", "scale"],
        streams=(streams, "T 4 D", FLOATS),
        fn=(fn, f"{outputs} 4*D", F32),
        base=(base, f"{outputs}", F32),
        scale=(scale, f"{scales}", F32),
    )
