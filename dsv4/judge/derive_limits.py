"""Derive every limit from what its number formats cost, and write ``limits.json``.

``python -m dsv4.judge.derive_limits`` simulates each rounding site on inputs that no run of the
audit has seen. A simulated *layer* is :data:`ROWS` rows of one of five families (Gaussian;
Student t with 4 degrees of freedom; channels of very unequal size; one huge channel; rows in 16
directions) through weights of its own, whose spectrum is flat or falls as 1/sqrt(k). A limit is
the upper prediction bound of one more layer (log-normal, Student), for the worst family, at
:data:`ALPHA`: the stated family-wise false-alarm rate over the comparisons in an audit. The
same for one more row is the limit of the worst row. Sizes are nano's; wider rows spread less.
Choices are another matter: the share of index entries that is missed grows as a smaller part of
them is kept (simulated: 12% at 40 of 160, 21% at 512 of 16,000, 29% at 512 of 262,144, for any
number of heads), so ``index_missed`` bounds layers whose rows keep a quarter or more.

Of the judge only the scripts ``derive_*`` import torch and ``kernels``.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from dsv4.judge.limits import FILE
from dsv4.judge.tails import student
from dsv4.judge.verdict import FAMILY
from kernels.formats import bf16, fp8_block, fp8_scaled, mxfp4, nvfp4
from kernels.hadamard.ref import hadamard

SEED = 4
LAYERS, ROWS = 64, 32  # simulated layers a family; rows of a prompt that are judged, at least
COMPARISONS = 1_100_000  # layers and rows that an audit of the largest model compares: a test counts them
ALPHA = FAMILY / COMPARISONS
HIDDEN, LORA, HEADS, HEAD_DIM, ROPE, O_LORA, FFN = 256, 128, 4, 256, 64, 128, 96
ENTRIES, TOP_K, INDEX_HEADS, INDEX_DIM = 160, 40, 8, 128
EXPERTS, ACTIVE = 16, 4
KEYS = 168  # a window of 128 and 40 entries
DEPTH = 61  # the deepest model: blocks through which errors compound
VOCAB = 320


class Draw:
    """The random inputs of one derivation; everything comes from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal, FP32."""
        return torch.randn(*shape, generator=self.generator)

    def families(self, size: int, layers: int = LAYERS) -> Iterator[Tensor]:
        """Rows ``[layers, ROWS, size]`` of each family."""
        x = self.normal(layers, ROWS, size)
        yield x
        yield x / self.normal(layers, ROWS, size, 4).square().mean(-1).sqrt()
        yield x * torch.exp(self.normal(layers, 1, size))
        spiked = x.clone()
        spiked[..., 0] *= 20.0
        yield spiked
        yield self.normal(layers, ROWS, 16) @ self.normal(layers, 16, size)

    def weights(self, rows: int, cols: int, layers: int = LAYERS) -> Iterator[Tensor]:
        """Matrices ``[layers, rows, cols]`` FP64 with a flat and with a falling spectrum."""
        w = self.normal(layers, rows, cols).double()
        yield w
        turn = torch.linalg.qr(self.normal(layers, rows, rows)).Q.double()
        yield turn @ (torch.arange(1, rows + 1, dtype=torch.float64)[:, None] ** -0.5 * w)


class Bounds:
    """Collects simulated errors under a name, and keeps the worst family's bounds."""

    def __init__(self) -> None:
        self.values: dict[str, float] = defaultdict(float)

    def error(self, name: str, test: Tensor, exact: Tensor) -> None:
        """Relative L2 ``[layers, rows, ...]``: of a layer, of its worst row; and the gain's error."""
        x, y = test.double().flatten(2), exact.double().flatten(2)
        moved, size = (x - y).square().sum(-1), y.square().sum(-1)
        self._keep(f"{name}.rel_l2", upper((moved / size).mean(1).sqrt()))
        self._keep(f"{name}.rel_l2_worst", upper((moved / size).sqrt().flatten()))
        gain = (x * y).sum((1, 2)) / size.sum(1) - 1
        self._keep(f"{name}.gain", student(ALPHA / 2, len(gain) - 1) * float(gain.square().mean().sqrt()))

    def positive(self, name: str, values: Tensor) -> None:
        """Bound of a positive quantity, one value a simulated layer."""
        self._keep(name, upper(values))

    def _keep(self, name: str, value: float) -> None:
        self.values[name] = max(self.values[name], value)


def upper(values: Tensor) -> float:
    """Prediction bound of one more value of a positive quantity, log-normal, at ALPHA; 0 if none is positive."""
    logs = values[values > 0].double().log()
    if len(logs) < 3:
        return 0.0
    t = student(ALPHA, len(logs) - 1)
    return float(torch.exp(logs.mean() + t * logs.std() * math.sqrt(1 + 1 / len(logs))))


def rmsnorm(x: Tensor) -> Tensor:
    """Unit root mean square, FP64."""
    return x.double() / x.double().square().mean(-1, keepdim=True).sqrt()


def store(x: Tensor) -> Tensor:
    """Store as BF16, read as FP64."""
    return bf16.round(x.float()).double()


def fp4(x: Tensor) -> Tensor:
    """Store an activation as NVFP4 with its row's gsa, read as FP64."""
    return nvfp4.round(x.float()).double()


def formats(draw: Draw, bounds: Bounds) -> None:
    """One store in each format."""
    sites: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
        "nvfp4": (nvfp4.round, HIDDEN),
        "nvfp4_lora": (nvfp4.round, LORA),
        "fp8_nope": (lambda x: fp8_block.round(x, 64), HEAD_DIM - ROPE),
        "bf16_rope": (bf16.round, ROPE),
        "index_key_fp8": (fp8_scaled.round, INDEX_DIM),
        "index_key_fp4": (lambda x: hadamard(mxfp4.round(hadamard(x))), INDEX_DIM),
        "bf16": (bf16.round, HIDDEN),
    }
    for name, (round_, size) in sites.items():
        for x in draw.families(size):
            bounds.error(name, round_(x), x)
    for x in draw.families(HIDDEN):
        bounds.error("bf16_norm_bf16", store(rmsnorm(store(x))), rmsnorm(x))


def products(draw: Draw, bounds: Bounds) -> None:
    """Quantised activations through weights: q_a, q_b, kv, the indexer's projections."""
    for x in draw.families(HIDDEN):
        for w in draw.weights(HIDDEN, LORA):
            bounds.error("qr", store(rmsnorm(store(fp4(x) @ w))), rmsnorm(x.double() @ w))
        for w in draw.weights(HIDDEN, HEAD_DIM):
            bounds.error("kv", store(store(rmsnorm(store(fp4(x) @ w)))), rmsnorm(x.double() @ w))
        for w in draw.weights(HIDDEN, INDEX_DIM):
            bounds.error("pooled", rmsnorm(_pool(store(x) @ w)), rmsnorm(_pool(x.double() @ w)))
        for w in draw.weights(HIDDEN, INDEX_HEADS):
            bounds.error("index_w", store(store(x) @ w), x.double() @ w)
    for x in draw.families(LORA):
        for w in draw.weights(LORA, HEADS * HEAD_DIM):
            narrow, exact = ((a @ w).unflatten(-1, (HEADS, -1)) for a in (fp4(x), x.double()))
            bounds.error("q", store(rmsnorm(store(narrow))), rmsnorm(exact))
        for w in draw.weights(LORA, INDEX_HEADS * INDEX_DIM):
            bounds.error("index_q", store(store(store(x) @ w)), x.double() @ w)


def _pool(x: Tensor) -> Tensor:
    """Softmax-gated sum over 8 rows, as the compressor does; the gates are the values' own neighbours."""
    slots = x.unflatten(1, (-1, 8))
    gate = torch.softmax(slots.roll(1, -1) / slots.std(), dim=2)
    return (slots * gate).sum(2)


def projections(draw: Draw, bounds: Bounds) -> None:
    """Output projection: two NVFP4 activations; and an expert: NVFP4, SwiGLU in BF16, NVFP4."""
    size, layers = HEADS * HEAD_DIM, LAYERS // 3
    for x in draw.families(size, layers):
        first, second = draw.weights(size // 2, O_LORA, layers), draw.weights(2 * O_LORA, HIDDEN, layers)
        for a, b in zip(first, second, strict=True):
            # Both groups are rows of one product: a broadcast one copies ``a`` for each row.
            narrow, exact = (
                (values.reshape(layers, 2 * ROWS, -1) @ a).reshape(layers, ROWS, -1)
                for values in (fp4(x), x.double())
            )
            bounds.error("attn_proj", store(fp4(store(narrow)) @ b), exact @ b)
    for x in draw.families(HIDDEN):
        x = rmsnorm(x).float()
        for w, down in zip(draw.weights(HIDDEN, 2 * FFN), draw.weights(FFN, HIDDEN), strict=True):
            w = w / (x.double() @ w).square().mean((1, 2), keepdim=True).sqrt()
            narrow, exact = store(fp4(x) @ w), x.double() @ w
            bounds.error("expert", store(fp4(store(_swiglu(narrow))) @ down), _swiglu(exact) @ down)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def attention(draw: Draw, bounds: Bounds) -> None:
    """Attention of rows over keys; q in BF16, or its nope part in one E4M3 term.

    Keys share a common direction or not; logits are spread by 1, 2 and 4.
    """
    nope = HEAD_DIM - ROPE
    for spread in (1.0, 2.0, 4.0):
        for shared in (0.0, 1.0):
            q = spread * rmsnorm(draw.normal(LAYERS, ROWS, HEAD_DIM))
            k = rmsnorm(draw.normal(LAYERS, KEYS, HEAD_DIM) + shared * draw.normal(LAYERS, 1, HEAD_DIM))
            k = torch.cat((fp8_block.round(k[..., :nope].float(), 64).double(), store(k[..., nope:])), -1)
            wide = store(q)
            low = torch.cat((fp8_block.round(q[..., :nope].float(), nope).double(), wide[..., nope:]), -1)
            sides = {
                "exact": _attend(q, k, False),
                "bf16": _attend(wide, k, True),
                "fp8": _attend(low, k, True),
            }
            for name, test, reference in (
                ("attn_bf16", "bf16", "exact"),
                ("attn_fp8", "fp8", "exact"),
                ("attn_fp8_b0", "fp8", "bf16"),
            ):
                (out, lse), (wanted, wanted_lse) = sides[test], sides[reference]
                bounds.error(name, out, wanted)
                bounds.positive(f"{name}.lse", (lse - wanted_lse).abs().amax(-1))


def _attend(q: Tensor, k: Tensor, rounded: bool) -> tuple[Tensor, Tensor]:
    logits = q @ k.mT * HEAD_DIM**-0.5  # [L, T, S]
    p = torch.exp(logits - logits.amax(-1, keepdim=True))
    out = ((store(p) if rounded else p) @ k) / (p.sum(-1, keepdim=True) + 1.0)
    return (store(store(out)) if rounded else out), logits.logsumexp(-1)


def indexer(draw: Draw, bounds: Bounds) -> None:
    """Scores and choice with FP8 keys (and FP8 queries) against the FP4 of training."""
    for shared in (0.0, 1.0):
        q = draw.normal(LAYERS, ROWS, INDEX_HEADS, INDEX_DIM) + shared * draw.normal(
            LAYERS, 1, INDEX_HEADS, INDEX_DIM
        )
        k = rmsnorm(
            draw.normal(LAYERS, ENTRIES, INDEX_DIM) + shared * draw.normal(LAYERS, 1, INDEX_DIM)
        ).float()
        w = draw.normal(LAYERS, ROWS, INDEX_HEADS).double()
        trained = _scores(mxfp4.round(hadamard(q)), mxfp4.round(hadamard(k)), w)
        for queries in (q, fp8_scaled.round(q)):
            scores = _scores(queries, fp8_scaled.round(k), w)
            best, chosen = (s.topk(TOP_K).indices for s in (trained, scores))
            kept = torch.zeros_like(trained).scatter(-1, chosen, 1.0)
            mass = trained.gather(-1, best)
            lost = (mass.sum(-1) - trained.gather(-1, chosen).sum(-1)) / mass.abs().sum(-1)
            bounds.error("index_scores", scores, trained)
            bounds.positive("index_missed", 1 - kept.gather(-1, best).mean((1, 2)))
            bounds.positive("index_mass_lost", lost.mean(1))


def _scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return (torch.einsum("lthd,lsd->lths", q.double(), k.double()).relu() * w[..., None]).sum(2)


def router(draw: Draw, bounds: Bounds) -> None:
    """Router scores of a BF16 input, and the share of chosen experts that flips."""
    share = 0.0
    for x in draw.families(HIDDEN):
        for w in draw.weights(HIDDEN, EXPERTS):
            w = w / (x.double() @ w).square().mean((1, 2), keepdim=True).sqrt()
            exact, narrow = (torch.nn.functional.softplus(a @ w).sqrt() for a in (x.double(), store(x)))
            bounds.error("router_scores", narrow, exact)
            best, chosen = (s.topk(ACTIVE).indices for s in (exact, narrow))
            hits = torch.zeros_like(exact).scatter(-1, chosen, 1.0).gather(-1, best)
            share = max(share, 1 - float(hits.mean()))
    flips = share * ACTIVE * ROWS
    worst = flips + math.sqrt(-2 * math.log(ALPHA) * flips) - math.log(ALPHA) / 1.5  # Bernstein, Poisson tail
    bounds.values["experts_missed"] = min(1.0, worst / (ACTIVE * ROWS))


def accumulation(draw: Draw, bounds: Bounds) -> None:
    """FP32 sums in sequence against FP64, the longest sums of DeepSeek-V4; Sinkhorn and gates on them."""
    worst = 0.0
    for size in (4096, 7168, 4 * 7168):
        a, b = draw.normal(64, size), draw.normal(64, size)
        total = torch.zeros(64)
        for column in range(size):
            total = total + a[:, column] * b[:, column]
        exact = (a.double() * b.double()).sum(-1)
        worst = max(worst, float((total.double() - exact).norm() / exact.norm()))
    bounds.values["fp32_sum"] = worst
    logits = draw.normal(LAYERS, ROWS, 4, 4).double() * 4
    moved = logits * (1 + worst * draw.normal(LAYERS, ROWS, 4, 4).double())
    bounds.error("comb", *(_sinkhorn(one).float() for one in (moved, logits)))
    bounds.error("gate", *(torch.sigmoid(one[..., 0]).float() for one in (moved, logits)))


def _sinkhorn(logits: Tensor) -> Tensor:
    comb = torch.softmax(logits, -1)
    for _ in range(20):
        comb = comb / comb.sum(-2, keepdim=True)
        comb = comb / comb.sum(-1, keepdim=True)
    return comb


def divergence(draw: Draw, block: float) -> float:
    """KL in nats that a relative error ``block`` in every block's output costs, mean of ROWS rows.

    Blocks add equal, independent parts to the residual and pass on the relative error of their
    input: after 2L blocks the relative variance is ``block^2 (1 + 1/2 + ... + 1/2L)``. Logits
    are Gaussian, scaled to entropies from 5 to 0.5 nats; the worst of them counts.
    """
    error = block * math.sqrt(sum(1 / n for n in range(1, 2 * DEPTH + 1)))
    found = []
    for scale in (1.0, 2.0, 3.0, 4.0):
        logits = draw.normal(LAYERS, ROWS, VOCAB).double() * scale
        noise = draw.normal(LAYERS, ROWS, VOCAB).double() * scale * error
        p, q = (torch.log_softmax(z, -1) for z in (logits, logits + noise))
        found.append(upper((p.exp() * (p - q)).sum(-1).mean(-1)))
    return max(found)


def derive(seed: int = SEED) -> dict[str, float]:
    """Every number that :mod:`dsv4.judge.limits` rests on."""
    bounds = Bounds()
    parts = (formats, products, projections, attention, indexer, router, accumulation)
    for k, part in enumerate(parts):
        part(Draw(seed + k), bounds)
    x = Draw(seed).normal(1024, HIDDEN)
    typical = {
        name: float((y - x).norm() / x.norm())
        for name, y in (("nvfp4", nvfp4.round(x)), ("fp8", fp8_block.round(x, 64)))
    }
    # Two NVFP4 activations lie on the way through each block; one more E4M3 store is a rung's own.
    bounds.values["kl_sum"] = divergence(Draw(seed + 100), math.sqrt(2) * typical["nvfp4"])
    bounds.values["kl_own"] = divergence(Draw(seed + 101), typical["fp8"])
    return {name: float(f"{value:.4g}") for name, value in sorted(bounds.values.items())}


def main() -> None:
    """Write ``limits.json`` beside this script."""
    content = {"seed": SEED, "alpha": ALPHA, "script": "dsv4/judge/derive_limits.py", "values": derive()}
    Path(FILE).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
