"""What the training record states: nats a byte, the indexer's recall, clamp hits, greedy answers."""

import time

import torch
from chats import ASSISTANT, EOT, USER
from corpus import BOS, EOS
from forward import INDEX_TOPK, Knobs, Nano
from torch import Tensor
from torch.nn import functional

ANSWER_SECONDS = 60  # an untrained model never ends its turn
PROMPTS = [
    "What is the capital of France?",
    "Name the capital of Japan.",
    "What is the opposite of hot?",
    "What is 3 plus 4?",
    "What day comes after Monday?",
    "Who are you?",
    "Hello!",
    "What colour is the sky?",
    "What is a list in Python?",
    "What does os.path.join do?",
    "What does json.dumps do?",
]
LONG_PROMPTS = ["Count from 1 to 20.", "Write the times table of 7.", "Recite the Zen of Python."]
FOLLOW_UPS = [("What is the capital of Italy?", "The capital of Italy is Rome.", "And what is 2 plus 2?"),
              ("Hi", "Hello! How can I help you?", "What is the capital of Spain?")]  # fmt: skip


def labelled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows [B, T + 1] into inputs [B, T] and labels; -1 pads, and BOS is never a label."""
    labels = rows[:, 1:].clone()
    labels[labels == BOS] = -1
    return rows[:, :-1].clamp(min=0), labels


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross entropy in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")


def nats_per_byte(nano: Nano, rows: Tensor, ctx: dict, knobs: Knobs, dtype: torch.dtype, batch: int) -> float:
    """Return the mean loss over every labelled position of rows [R, T + 1]."""
    total = rows.new_zeros((), dtype=torch.float64)
    count = rows.new_zeros(())
    for piece in rows.split(batch):
        padded = functional.pad(
            piece, (0, 0, 0, batch - len(piece)), value=-1
        )  # one shape: nothing to recompile
        ids, labels = labelled(padded)
        total += loss_sum(nano(ids, ctx, knobs, dtype)[0].detach(), labels)
        count += (labels >= 0).sum()
    return (total / count).item()


@torch.no_grad()
def transformers_nats(model: torch.nn.Module, rows: Tensor) -> list[float]:
    """Return transformers' own summed loss of each row of [R, T + 1], in nats."""
    out = []
    for row in rows:
        ids, labels = labelled(row[None])
        out.append(loss_sum(model(ids, use_cache=False).logits.float(), labels).item())
    return out


@torch.no_grad()
def recall(nano: Nano, rows: Tensor, ctx: dict, knobs: Knobs) -> list[dict]:
    """Return, for each CSA layer, the share of attention mass over entries that a choice of 40 catches.

    Queries are those that see more than 40 entries; the mass is what attention over all visible entries
    would give them, summed over heads. ``random`` is one random choice of 40 visible entries, ``best``
    the 40 with the most mass.
    """
    generator = torch.Generator(rows.device).manual_seed(0)
    visible = ctx["visible4"]
    sums: dict[int, Tensor] = {}
    for row in rows:
        taps: dict = {}
        ids, labels = labelled(row[None])
        nano(ids, ctx, knobs, torch.float32, taps)
        kept = (labels[0] >= 0) & (visible.sum(-1) > INDEX_TOPK)
        for layer, (mass, chosen) in zip(
            [i for i, r in enumerate(nano.ratios) if r == 4], taps["recall"], strict=True
        ):
            mass = mass[0][kept] / mass[0][kept].sum(-1, keepdim=True)
            noise = torch.rand(mass.shape, generator=generator, device=mass.device)
            lots = noise.masked_fill(~visible[kept], -1).topk(INDEX_TOPK, -1).indices
            shares = [
                (mass * chosen[0][kept]).sum(),
                mass.gather(-1, lots).sum(),
                mass.topk(INDEX_TOPK, -1).values.sum(),
                kept.sum(),
            ]
            sums[layer] = sums.get(layer, 0) + torch.stack([s.double() for s in shares])
    names = ("indexer", "random", "best")
    return [
        {"layer": layer, **dict(zip(names, (s[:3] / s[3]).tolist(), strict=True)), "queries": int(s[3])}
        for layer, s in sums.items()
    ]


@torch.no_grad()
def clamp_hits(nano: Nano, rows: Tensor, ctx: dict, knobs: Knobs) -> dict:
    """Return the share of SwiGLU inputs at the limit, by layer, and the quantiles before the clamp."""
    taps: dict = {}
    nano(labelled(rows)[0], ctx, knobs, torch.float32, taps)
    limit = knobs.swiglu_limit.item()
    layers, gates, ups = [], [], []
    for gate, up, chosen, shared_gate, shared_up in taps["swiglu"]:
        chosen = chosen.expand_as(gate)
        gate, up = gate[chosen], up[chosen].abs()
        layers.append(
            {
                "routed_gate": (gate > limit).float().mean().item(),
                "routed_up": (up > limit).float().mean().item(),
                "shared_gate": (shared_gate > limit).float().mean().item(),
                "shared_up": (shared_up.abs() > limit).float().mean().item(),
            }
        )
        gates.append(gate[::101])
        ups.append(up[::101])
    levels = torch.tensor([0.5, 0.9, 0.99, 0.999, 0.9999], device=rows.device)
    overall = {key: sum(layer[key] for layer in layers) / len(layers) for key in layers[0]}
    samples = {"gate": torch.cat(gates), "abs_up": torch.cat(ups)}
    quantiles = {
        name: torch.quantile(
            values[torch.randperm(len(values), device=rows.device)[:1_000_000]], levels
        ).tolist()
        for name, values in samples.items()
    }
    return {
        "limit": limit,
        "mean": overall,
        "layers": layers,
        "levels": levels.tolist(),
        "quantiles": quantiles,
    }


@torch.no_grad()
def answers(model: torch.nn.Module, device: str, most: int) -> list[dict]:
    """Return transformers' greedy answer to each prompt, and whether it ended its turn."""
    chats = [[(prompt, None)] for prompt in PROMPTS] + [[(q, a), (last, None)] for q, a, last in FOLLOW_UPS]
    chats += [[(prompt, None)] for prompt in LONG_PROMPTS]
    out = []
    deadline = time.time() + ANSWER_SECONDS
    for chat in chats:
        if time.time() > deadline:
            break
        ids = [BOS]
        for question, answer in chat:
            ids += [USER, *question.encode(), EOT, ASSISTANT]
            ids += [] if answer is None else [*answer.encode(), EOT]
        start = torch.tensor([ids], device=device)
        new = model.generate(
            start,
            attention_mask=torch.ones_like(start),
            max_new_tokens=most,
            do_sample=False,
            eos_token_id=[EOS, EOT],
            pad_token_id=EOS,
        )[0, len(ids) :].tolist()
        text = bytes(i for i in new if i < 256).decode(errors="replace")
        out.append(
            {"prompt": chat[-1][0], "answer": text, "tokens": len(new), "ended": new[-1] in (EOS, EOT)}
        )
    return out
