"""Muon for the matrices, in batches of equal shape; everything else is left to AdamW."""

from collections import defaultdict

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Keller Jordan's quintic (github.com/KellerJordan/Muon)


def as_matrices(name: str, tensor: Tensor) -> Tensor:
    """View a weight as the independent matrices [k, out, in] that it stacks."""
    if name.endswith("experts.gate_up_proj"):  # gate and up are two matrices of each expert
        return tensor.view(2 * tensor.shape[0], tensor.shape[1] // 2, tensor.shape[2])
    if name.endswith("o_a_proj.weight"):  # two groups
        return tensor.view(2, tensor.shape[0] // 2, tensor.shape[1])
    if name.endswith("q_b_proj.weight"):  # eight heads, here and in the indexer
        return tensor.view(8, tensor.shape[0] // 8, tensor.shape[1])
    return tensor.view(-1, *tensor.shape[-2:])


def orthogonalise(update: Tensor) -> Tensor:
    """Push the singular values of each matrix of [k, m, n] towards 1, in BF16."""
    a, b, c = NEWTON_SCHULZ
    wide = update.shape[1] <= update.shape[2]
    x = (update if wide else update.mT).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).float()


class Muon:
    """Muon with decoupled weight decay; the update's RMS is 0.2 of ``lr``, as AdamW's would be."""

    def __init__(self, named: dict[str, Tensor], *, weight_decay: float, momentum: float = 0.95) -> None:
        self.weight_decay, self.momentum = weight_decay, momentum
        groups = defaultdict(list)
        for name, param in named.items():
            groups[as_matrices(name, param.data).shape[1:]].append((name, param))
        self.groups = list(groups.values())
        self.buffers: list[Tensor | None] = [None] * len(self.groups)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the parameters from their gradients and clear these."""
        for i, group in enumerate(self.groups):
            grads = torch.cat([as_matrices(name, param.grad) for name, param in group])
            buffer = self.buffers[i]
            if buffer is None:
                buffer = self.buffers[i] = torch.zeros_like(grads)
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonalise(grads.lerp(buffer, self.momentum))
            update *= 0.2 * max(update.shape[1:]) ** 0.5 * lr
            views = [as_matrices(name, param.data) for name, param in group]
            torch._foreach_mul_(views, 1 - lr * self.weight_decay)
            torch._foreach_sub_(views, list(update.split([len(view) for view in views])))
            for _, param in group:
                param.grad = None
