# ruff: noqa: ANN001, ANN202 -- jit bodies and autograd hooks
"""Sinkhorn's normalisation of mHC's 4x4 matrices as one operator with its own gradient.

Unrolled by autograd it is 80 small kernels a site and direction; here it is one each way. On the GPU
a Triton kernel, elsewhere plain torch.
"""

import torch
from torch import Tensor

EPS = 1e-6
ITERATIONS = 20
ADJOINT_ITERATIONS = 20

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU-only installs train nothing, but run the tests
    triton = None

if triton is not None:

    @triton.jit
    def _sinkhorn_kernel(
        logits_ptr, out_ptr, count, EPS: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr
    ):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        row, col = tl.arange(0, 4), tl.arange(0, 4)
        offs = token[:, None, None] * 16 + row[None, :, None] * 4 + col[None, None, :]
        mask = (token < count)[:, None, None]
        x = tl.load(logits_ptr + offs, mask, other=0.0)
        x = tl.exp(x - tl.max(x, 2, keep_dims=True))
        x = x / tl.sum(x, 2, keep_dims=True) + EPS
        x = x / (tl.sum(x, 1, keep_dims=True) + EPS)
        for _ in range(ITERATIONS - 1):
            x = x / (tl.sum(x, 2, keep_dims=True) + EPS)
            x = x / (tl.sum(x, 1, keep_dims=True) + EPS)
        tl.store(out_ptr + offs, x, mask)

    @triton.jit
    def _adjoint_kernel(comb_ptr, grad_ptr, out_ptr, count, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        row, col = tl.arange(0, 4), tl.arange(0, 4)
        offs = token[:, None, None] * 16 + row[None, :, None] * 4 + col[None, None, :]
        mask = (token < count)[:, None, None]
        comb = tl.load(comb_ptr + offs, mask, other=0.25)
        grad = tl.load(grad_ptr + offs, mask, other=0.0)
        row_sum = tl.sum(comb * grad, 2, keep_dims=True)
        col_sum = tl.sum(comb * grad, 1, keep_dims=True)
        alpha = row_sum * 0.0
        beta = col_sum
        for _ in range(ITERATIONS):
            alpha = row_sum - tl.sum(comb * beta, 2, keep_dims=True)
            beta = col_sum - tl.sum(comb * alpha, 1, keep_dims=True)
        tl.store(out_ptr + offs, comb * (grad - alpha - beta), mask)


@torch.library.custom_op("nano::sinkhorn", mutates_args=())
def sinkhorn(logits: Tensor) -> Tensor:
    """Return the doubly stochastic matrices [..., 4, 4] of FP32 ``logits``.

    Softmax over rows, + eps, columns once, then 19 times rows and columns, each divisor + eps.
    """
    if logits.is_cuda:
        logits = logits.contiguous()
        out = torch.empty_like(logits)
        count = logits.numel() // 16
        _sinkhorn_kernel[(triton.cdiv(count, 128),)](logits, out, count, EPS, ITERATIONS, 128)
        return out
    x = logits.softmax(-1) + EPS
    x = x / (x.sum(-2, keepdim=True) + EPS)
    for _ in range(ITERATIONS - 1):
        x = x / (x.sum(-1, keepdim=True) + EPS)
        x = x / (x.sum(-2, keepdim=True) + EPS)
    return x


@torch.library.custom_op("nano::sinkhorn_adjoint", mutates_args=())
def sinkhorn_adjoint(comb: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient for the logits, taking ``comb`` as the fixed point.

    At the fixed point comb = diag(a) exp(L) diag(b), so the gradient is grad with a row and a column
    term removed such that its comb-weighted row and column sums vanish; these are iterated for.
    """
    if comb.is_cuda:
        comb, grad = comb.contiguous(), grad.contiguous()
        out = torch.empty_like(comb)
        count = comb.numel() // 16
        _adjoint_kernel[(triton.cdiv(count, 128),)](comb, grad, out, count, ADJOINT_ITERATIONS, 128)
        return out
    row_sum, col_sum = (comb * grad).sum(-1, keepdim=True), (comb * grad).sum(-2, keepdim=True)
    alpha, beta = torch.zeros_like(row_sum), col_sum
    for _ in range(ADJOINT_ITERATIONS):
        alpha = row_sum - (comb * beta).sum(-1, keepdim=True)
        beta = col_sum - (comb * alpha).sum(-2, keepdim=True)
    return comb * (grad - alpha - beta)


@sinkhorn.register_fake
def _(logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@sinkhorn_adjoint.register_fake
def _(comb: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(comb, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(output)


def _backward(ctx, grad: Tensor) -> Tensor:
    return sinkhorn_adjoint(ctx.saved_tensors[0], grad)


sinkhorn.register_autograd(_backward, setup_context=_save)
