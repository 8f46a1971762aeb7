"""DeepSeek-V4's forward pass for training: transformers' parameters, but blocked and compilable.

The same function as ``DeepseekV4ForCausalLM`` (checked in test_nano.py), made fast for a model this
small: the window's keys come in blocks of 128 queries, the experts run densely with the router's
weights (0 for the unchosen), Sinkhorn is one kernel. It adds what transformers does not have: the
indexer's loss and the training-time rounding, both switched by ``Knobs`` without recompiling.
"""

import math
from typing import NamedTuple

import torch
from quantise import fake_quantise, power_below, round_e2m1, round_e4m3
from sinkhorn import sinkhorn
from torch import Tensor
from torch.nn import functional

WINDOW = 128
HEADS, HEAD_DIM, ROPE = 8, 256, 64
INDEX_HEADS, INDEX_DIM, INDEX_TOPK = 8, 128, 40
EXPERTS, ACTIVE, FFN = 16, 4, 96
STREAMS, HIDDEN, EPS = 4, 256, 1e-6
ROUTED_SCALE = 1.5


class Knobs(NamedTuple):
    """Switches that are tensors (0-dim), so that turning one compiles nothing anew."""

    weight_rounding: Tensor  # 0..1: share of the NVFP4 rounding that the forward pass sees
    act_rounding: Tensor  # 0..1: the same for the FP8 KV and FP4 indexer rounding
    dropout: Tensor
    dense: Tensor  # 1: CSA layers attend to every visible entry (warm-up); 0: to the chosen 40
    swiglu_limit: Tensor


def through(x: Tensor, rounded: Tensor, share: Tensor) -> Tensor:
    """Replace ``x`` by a mix with its rounded values; the gradient passes straight through."""
    return x + share * (rounded - x).detach()


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply in ``dtype``."""
    return functional.linear(x.to(dtype), weight.to(dtype))


def stored_weight(weight: Tensor, knobs: Knobs) -> Tensor:
    """Return an NVFP4 weight as the forward pass should see it."""
    return through(weight, fake_quantise(weight.detach()), knobs.weight_rounding)


def unit_rms(x: Tensor) -> Tensor:
    """Divide by the root mean square, in FP32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to the last 64 dims of FP32 ``x``, in interleaved pairs."""
    nope, rope = x[..., :-ROPE], x[..., -ROPE:]
    even, odd = rope[..., 0::2], rope[..., 1::2]
    rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([nope, rotated], -1)


def round_kv(kv: Tensor, knobs: Knobs) -> Tensor:
    """Round as the cache does: nope to E4M3 with a power-of-two scale per 64, rope to BF16."""
    nope = kv[..., :-ROPE].detach().unflatten(-1, (-1, 64))
    amax = nope.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    # The smallest power of two s with 448 s >= amax: 448 = 1.75 * 2^8.
    scale = power_below(amax)
    scale = torch.where(amax > 1.75 * scale, 2 * scale, scale) / 256
    rounded = round_e4m3((nope / scale).abs()) * nope.sign() * scale
    rope = kv[..., -ROPE:].detach().bfloat16().float()
    return through(kv, torch.cat([rounded.flatten(-2), rope], -1), knobs.act_rounding)


def round_index(x: Tensor, hadamard: Tensor, knobs: Knobs) -> Tensor:
    """Rotate by the Hadamard matrix, then round to E2M1 with a power-of-two scale per 32."""
    x = x.float() @ hadamard
    blocks = x.detach().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126)
    scale = power_below(amax)  # 6 = 1.5 * 2^2
    scale = torch.where(amax > 1.5 * scale, 2 * scale, scale) / 4
    return through(x, (round_e2m1(blocks / scale) * scale).flatten(-2), knobs.act_rounding)


def compress(
    p: dict, prefix: str, x: Tensor, ratio: int, rope: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """Pool every ``ratio`` tokens [B, T, d] into one entry [B, T / ratio, dim]; ratio 4 overlaps."""
    kv = linear(x, p[f"{prefix}.kv_proj.weight"], dtype).float().unflatten(1, (-1, ratio))
    gate = linear(x, p[f"{prefix}.gate_proj.weight"], dtype).float().unflatten(1, (-1, ratio))
    gate = gate + p[f"{prefix}.position_bias"]
    if ratio == 4:  # window w pools w-1's first series and its own second
        (kv_before, kv_now), (gate_before, gate_now) = kv.chunk(2, -1), gate.chunk(2, -1)
        kv_before = functional.pad(kv_before[:, :-1], (0, 0, 0, 0, 1, 0))
        gate_before = functional.pad(gate_before[:, :-1], (0, 0, 0, 0, 1, 0), value=-math.inf)
        kv, gate = torch.cat([kv_before, kv_now], 2), torch.cat([gate_before, gate_now], 2)
    pooled = (kv * gate.softmax(2)).sum(2)
    cos, sin = rope
    return rotate(unit_rms(pooled) * p[f"{prefix}.kv_norm.weight"], cos[::ratio], sin[::ratio])


def index_scores(p: dict, x: Tensor, qr: Tensor, ctx: dict, knobs: Knobs, dtype: torch.dtype) -> Tensor:
    """Score every entry for every token, FP32 [B, T, C]; entries not yet complete get -inf."""
    prefix = "self_attn.compressor.indexer"
    cos, sin = ctx["compress"]
    keys = compress(p, prefix, x, 4, (cos, sin), dtype)
    q = linear(qr, p[f"{prefix}.q_b_proj.weight"], dtype).float().unflatten(-1, (INDEX_HEADS, INDEX_DIM))
    q = rotate(q, cos[:, None], sin[:, None])
    keys, q = round_index(keys, ctx["hadamard"], knobs), round_index(q, ctx["hadamard"], knobs)
    dots = torch.einsum("bthd,bcd->bthc", q.to(dtype), keys.to(dtype)).float()
    weights = linear(x, p[f"{prefix}.scorer.weights_proj.weight"], dtype).float()
    scores = (functional.relu(dots) * weights.unsqueeze(-1)).sum(2) * (INDEX_DIM * INDEX_HEADS) ** -0.5
    return scores.masked_fill(~ctx["visible4"], -math.inf)


def choose(scores: Tensor) -> Tensor:
    """Return the mask [B, T, C] of each token's index_topk best entries (visible or not)."""
    top = scores.topk(min(INDEX_TOPK, scores.shape[-1]), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, top, True)


def attention_mass(win: Tensor, comp: Tensor, sinks: Tensor) -> Tensor:
    """Return the probability that all heads together give each visible entry, [B, T, C], without gradient."""
    win, comp = win.detach().flatten(1, 2), comp.detach()
    top = torch.maximum(win.amax(-1), comp.amax(-1)).maximum(sinks.detach())
    total = (win - top[..., None]).exp().sum(-1) + (comp - top[..., None]).exp().sum(-1)
    total = total + (sinks.detach() - top).exp()
    return ((comp - top[..., None]).exp() / total[..., None]).sum(2)


def index_loss(mass: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
    """Return KL(attention mass || softmax(scores)) over visible entries, mean over tokens that have any."""
    target = mass / mass.sum(-1, keepdim=True).clamp(min=1e-20)
    logp = scores.masked_fill(~visible, -1e30).log_softmax(-1)
    kl = torch.where(target > 0, target * (target.clamp(min=1e-30).log() - logp), 0.0).sum(-1)
    return kl.sum() / (visible.any(-1).sum() * scores.shape[0])


def attention(
    p: dict, x: Tensor, ratio: int, ctx: dict, knobs: Knobs, dtype: torch.dtype, taps: dict | None
) -> tuple[Tensor, Tensor]:
    """Return the attention block's output [B, T, d] and the indexer's loss (0 without an indexer)."""
    B, T, _ = x.shape
    C = T // ratio if ratio else 0
    blocks = T // WINDOW
    cos, sin = ctx["compress" if ratio else "main"]
    sinks = p["self_attn.sinks"]

    def proj(name: str, inputs: Tensor) -> Tensor:
        return linear(inputs, stored_weight(p[f"self_attn.{name}.weight"], knobs), dtype)

    qr = unit_rms(proj("q_a_proj", x)) * p["self_attn.q_a_norm.weight"]
    q = unit_rms(proj("q_b_proj", qr).unflatten(-1, (HEADS, HEAD_DIM)))
    q = rotate(q, cos[:, None], sin[:, None]).to(dtype)  # [B, T, H, K]
    kv = rotate(unit_rms(proj("kv_proj", x)) * p["self_attn.kv_norm.weight"], cos, sin)
    kv = round_kv(kv, knobs).to(dtype)  # [B, T, K]

    keys = kv.view(B, blocks, WINDOW, HEAD_DIM)
    keys = torch.cat(
        [functional.pad(keys[:, :-1], (0, 0, 0, 0, 1, 0)), keys], 2
    )  # this block of keys and the one before
    win = q.view(B, blocks, WINDOW * HEADS, HEAD_DIM) @ keys.mT
    win = win.float().view(B, blocks, WINDOW, HEADS, 2 * WINDOW) * HEAD_DIM**-0.5
    win = win.masked_fill(~ctx["window"], -math.inf)

    kl = x.new_zeros(())
    top = win.amax(-1).flatten(1, 2).maximum(sinks)
    if ratio:
        entries = round_kv(compress(p, "self_attn.compressor", x, ratio, (cos, sin), dtype), knobs).to(dtype)
        comp = (q.flatten(1, 2) @ entries.mT).float().view(B, T, HEADS, C) * HEAD_DIM**-0.5
        comp = comp.masked_fill(~ctx[f"visible{ratio}"][:, None], -math.inf)
        if ratio == 4:
            scores = index_scores(p, x.detach(), qr.detach(), ctx, knobs, dtype)
            mass = attention_mass(win, comp, sinks)
            kl = index_loss(mass, scores, ctx["visible4"])
            chosen = choose(scores.detach())
            if taps is not None:
                taps.setdefault("recall", []).append((mass, chosen))
            comp = comp.masked_fill(~(chosen | (knobs.dense > 0))[:, :, None], -math.inf)
        top = top.maximum(comp.amax(-1))
    top = top.detach()
    win = (win - top.view(B, blocks, WINDOW, HEADS, 1)).exp()
    total = win.sum(-1).view(B, T, HEADS) + (sinks - top).exp()
    out = (win.to(dtype).flatten(2, 3) @ keys).view(B, T, HEADS, HEAD_DIM).float()
    if ratio:
        comp = (comp - top[..., None]).exp()
        total = total + comp.sum(-1)
        out = out + (comp.to(dtype).flatten(1, 2) @ entries).view(B, T, HEADS, HEAD_DIM).float()
    out = rotate(out / total[..., None], cos[:, None], -sin[:, None])

    o_a = stored_weight(p["self_attn.o_a_proj.weight"], knobs).to(dtype)
    groups = HEADS * HEAD_DIM // o_a.shape[1]
    grouped = torch.einsum(
        "btgi,goi->btgo", out.to(dtype).reshape(B, T, groups, -1), o_a.unflatten(0, (groups, -1))
    )
    return proj("o_b_proj", grouped.flatten(2)).float(), kl


def swiglu(gate: Tensor, up: Tensor, knobs: Knobs) -> Tensor:
    """Return silu(min(gate, limit)) * clamp(up, +-limit), FP32."""
    limit = knobs.swiglu_limit
    return functional.silu(gate.float().minimum(limit)) * up.float().minimum(limit).maximum(-limit)


def moe(
    p: dict, x: Tensor, ids: Tensor, knobs: Knobs, dtype: torch.dtype, taps: dict | None
) -> tuple[Tensor, Tensor]:
    """Return routed + shared output [B, T, d] and the share of tokens that each expert got, times 16 / 4."""
    scores = functional.softplus(functional.linear(x.float(), p["mlp.gate.weight"])).sqrt()
    if "mlp.gate.tid2eid" in p:
        chosen = p["mlp.gate.tid2eid"][ids]
    else:
        chosen = (scores.detach() + p["mlp.gate.e_score_correction_bias"]).topk(ACTIVE, -1).indices
    weight = scores.gather(-1, chosen)
    weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * ROUTED_SCALE
    dense = torch.zeros_like(scores).scatter(-1, chosen, weight)  # [B, T, E]
    load = (dense > 0).float().mean((0, 1)) * (EXPERTS / ACTIVE)

    gate_up = stored_weight(p["mlp.experts.gate_up_proj"], knobs)
    down = stored_weight(p["mlp.experts.down_proj"], knobs)
    gate, up = linear(x, gate_up.flatten(0, 1), dtype).unflatten(-1, (EXPERTS, 2 * FFN)).chunk(2, -1)
    act = swiglu(gate, up, knobs) * dense.unsqueeze(-1)
    routed = linear(act.flatten(-2), down.transpose(0, 1).flatten(1), dtype)

    def shared(name: str, inputs: Tensor) -> Tensor:
        return linear(inputs, stored_weight(p[f"mlp.shared_experts.{name}_proj.weight"], knobs), dtype)

    shared_gate, shared_up = shared("gate", x), shared("up", x)
    if taps is not None:
        chosen_mask = (dense > 0).unsqueeze(-1)
        taps.setdefault("swiglu", []).append((gate, up, chosen_mask, shared_gate, shared_up))
    return (routed + shared("down", swiglu(shared_gate, shared_up, knobs))).float(), load


def mix(p: dict, site: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block's input [B, T, d], post [B, T, 4] and comb [B, T, 4, 4] of one mHC site."""
    scale, base = p[f"{site}.scale"], p[f"{site}.base"]
    mixed = functional.linear(unit_rms(streams.flatten(2)), p[f"{site}.fn"])
    pre = torch.sigmoid(mixed[..., :4] * scale[0] + base[:4]) + EPS
    post = 2 * torch.sigmoid(mixed[..., 4:8] * scale[1] + base[4:8])
    comb = sinkhorn((mixed[..., 8:] * scale[2] + base[8:]).unflatten(-1, (STREAMS, STREAMS)))
    return (pre.unsqueeze(-1) * streams).sum(2), post, comb


def add(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor, dropout: Tensor) -> Tensor:
    """Return X'_k = post_k * dropped(out) + sum_j comb[j, k] X_j, FP32."""
    out = torch.where(torch.rand_like(out) >= dropout, out / (1 - dropout), 0.0)
    carried = (comb.unsqueeze(-1) * streams.unsqueeze(3)).sum(2)
    return post.unsqueeze(-1) * out.unsqueeze(2) + carried


def block(
    p: dict,
    streams: Tensor,
    ids: Tensor,
    ratio: int,
    ctx: dict,
    knobs: Knobs,
    dtype: torch.dtype,
    taps: dict | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one decoder layer on FP32 streams [B, T, 4, d]; also return the indexer's loss and expert loads."""
    x, post, comb = mix(p, "attn_hc", streams)
    out, kl = attention(p, unit_rms(x) * p["input_layernorm.weight"], ratio, ctx, knobs, dtype, taps)
    streams = add(streams, out, post, comb, knobs.dropout)
    x, post, comb = mix(p, "ffn_hc", streams)
    out, load = moe(p, unit_rms(x) * p["post_attention_layernorm.weight"], ids, knobs, dtype, taps)
    return add(streams, out, post, comb, knobs.dropout), kl, load


def head(p: dict, streams: Tensor, dtype: torch.dtype) -> Tensor:
    """Collapse the streams and return FP32 logits [B, T, V]."""
    mixed = functional.linear(unit_rms(streams.flatten(2)), p["model.hc_head.hc_fn"])
    pre = torch.sigmoid(mixed * p["model.hc_head.hc_scale"] + p["model.hc_head.hc_base"]) + EPS
    x = unit_rms((pre.unsqueeze(-1) * streams).sum(2)) * p["model.norm.weight"]
    return linear(x, p["lm_head.weight"], dtype).float()


def context(rotary: torch.nn.Module, length: int, device: str) -> dict:
    """Return what depends only on the length: RoPE tables, masks and the Hadamard matrix."""
    pos = torch.arange(length, device=device)
    ctx = {}
    for kind in ("main", "compress"):
        angle = pos[:, None].float() * getattr(rotary, f"{kind}_inv_freq").to(device).float()
        ctx[kind] = (angle.cos(), angle.sin())
    for ratio in (4, 128):
        ctx[f"visible{ratio}"] = torch.arange(length // ratio, device=device) < ((pos + 1) // ratio)[:, None]
    query, key = torch.arange(WINDOW, device=device)[:, None], torch.arange(2 * WINDOW, device=device)
    window = (key > query) & (key <= query + WINDOW)
    window = window.expand(length // WINDOW, -1, -1).clone()
    window[0, :, :WINDOW] = False  # nothing before the first block
    ctx["window"] = window[:, :, None]  # [blocks, W, 1, 2 W]
    hadamard = torch.ones(1, 1, device=device)
    while len(hadamard) < INDEX_DIM:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    ctx["hadamard"] = hadamard * INDEX_DIM**-0.5
    return ctx


class Nano:
    """The model as plain dictionaries of tensors, one for each layer, over a transformers model's parameters."""

    def __init__(self, model: torch.nn.Module, *, compiled: bool = False) -> None:
        tensors = dict(model.named_parameters()) | {
            n: b for n, b in model.named_buffers() if "inv_freq" not in n
        }
        depth = len(model.model.layers)
        self.layers = []
        for i in range(depth):
            prefix = f"model.layers.{i}."
            self.layers.append(
                {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            )
        self.top = {n: t for n, t in tensors.items() if ".layers." not in n}
        ratios = {
            "sliding_attention": 0,
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 128,
        }
        self.ratios = [ratios[kind] for kind in model.config.layer_types]
        self.rotary = model.model.rotary_emb
        self.block = torch.compile(block, dynamic=False) if compiled else block
        self.head = torch.compile(head, dynamic=False) if compiled else head

    def __call__(
        self, ids: Tensor, ctx: dict, knobs: Knobs, dtype: torch.dtype, taps: dict | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [B, T, V], the mean indexer loss, and the expert loads [layers, E]."""
        streams = (
            functional.embedding(ids, self.top["model.embed_tokens.weight"])
            .unsqueeze(2)
            .expand(-1, -1, STREAMS, -1)
        )
        streams = streams.contiguous()
        kls, loads = [], []
        for p, ratio in zip(self.layers, self.ratios, strict=True):
            extra = {} if taps is None else {"taps": taps}
            streams, kl, load = self.block(p, streams, ids, ratio, ctx, knobs, dtype, **extra)
            kls.append(kl)
            loads.append(load)
        return self.head(self.top, streams, dtype), torch.stack(kls), torch.stack(loads)
