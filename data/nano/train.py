"""Train nano on one GPU: ``python data/nano/train.py --out DIR``.

Writes DIR/model.safetensors (NVFP4), config.json, training.json and heldout.txt. The schedule runs on
the clock: warm-up, constant, then linear to zero. The indexer learns from the start; CSA layers attend
densely in the first quarter, to its choice from then on. The last part trains through the rounding of
the stored weights, the KV cache and the indexer (straight-through).

The corpus is small: 100 s (6 passes) gave 0.695 nats a byte on held-out text, 700 s (36 passes) 0.737,
in spite of more dropout, decay and noise. The defaults are the better run's.
"""

import argparse
import json
import math
import platform
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from chats import Chats
from corpus import BOS, Document, epoch, eval_rows, read_sample, split, summary, write_sample
from evaluate import answers, clamp_hits, labelled, loss_sum, nats_per_byte, recall, transformers_nats
from forward import Knobs, Nano, context
from optim import Muon
from quantise import load, save
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

HERE = Path(__file__).resolve().parent
SEED = 20250
CHECK_BYTES = 800  # of the sample's first file: what the quick test computes again


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100, help="training time after the warm-up steps")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps instead (for tests)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--chat-share", type=float, default=0.12, help="share of the rows that are chats")
    parser.add_argument("--muon-lr", type=float, default=4e-3)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument(
        "--noise", type=float, default=0.0, help="largest share of a row's input bytes replaced"
    )
    parser.add_argument("--swiglu-limit", type=float, default=2.5)
    parser.add_argument("--eval-every", type=float, default=30, help="seconds")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def build(args: argparse.Namespace) -> DeepseekV4ForCausalLM:
    """Return the model with its starting weights and the fixed tables of the hash layers."""
    config = DeepseekV4Config.from_pretrained(HERE)
    config.swiglu_limit = args.swiglu_limit
    config._attn_implementation = "eager"
    torch.manual_seed(SEED)
    model = DeepseekV4ForCausalLM(config).float()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.5)
        for i, layer in enumerate(model.model.layers):
            # Streams start apart: each site reads mostly one of them and mixes little.
            for site, module in enumerate((layer.attn_hc, layer.ffn_hc)):
                module.scale.fill_(0.3)
                module.base[:4] = -1.0
                module.base[(2 * i + site) % 4] = 1.0
                module.base[8:] = 2 * torch.eye(4).flatten()
            if layer.mlp.is_hash:
                layer.mlp.gate.tid2eid.copy_(balanced_table(config.vocab_size, SEED + i))
    return model.to(args.device)


def balanced_table(vocab: int, seed: int) -> Tensor:
    """Return a table [vocab, 4] of four distinct experts a token, every expert equally often."""
    rng = np.random.default_rng(seed)
    deals = [rng.permutation(16).reshape(4, 4) for _ in range(vocab // 4)]
    return torch.from_numpy(rng.permutation(np.concatenate(deals)))


class Batches:
    """Endless batches [B, T + 1]: text rows, one shuffled pass after the other, and chat rows."""

    def __init__(self, documents: list[Document], args: argparse.Namespace) -> None:
        self.documents, self.length, self.device = documents, args.length + 1, args.device
        self.chat_rows = round(args.batch * args.chat_share)
        self.text_rows = args.batch - self.chat_rows
        self.rng = np.random.default_rng(SEED)
        self.chats = Chats(documents, SEED)
        self.left = np.empty((0, self.length), dtype=np.int64)
        self.passes = 0

    def next(self) -> Tensor:
        """Return the next batch on the device."""
        if len(self.left) < self.text_rows:
            rows = epoch(self.documents, self.length, self.rng)
            self.left = np.concatenate([self.left, self.rng.permutation(rows)])
            self.passes += 1
        text, self.left = self.left[: self.text_rows], self.left[self.text_rows :]
        rows = np.concatenate([text, self.chats.rows(self.chat_rows, self.length)])
        batch = torch.from_numpy(rows)
        return batch.pin_memory().to(self.device, non_blocking=True) if self.device == "cuda" else batch


def corrupt(ids: Tensor, most: float) -> Tensor:
    """Replace bytes of every second row's input by bytes from elsewhere in the batch, a share of 0..most of them.

    The labels stay right. It keeps a small corpus from being learned by heart.
    """
    share = torch.rand(len(ids), 1, device=ids.device) * most
    share[::2] = 0
    hit = (torch.rand(ids.shape, device=ids.device) < share) & (ids < BOS)
    other = ids.flatten()[torch.randint(ids.numel(), ids.shape, device=ids.device)]
    return torch.where(hit & (other < BOS), other, ids)


class Schedule:
    """Everything that changes with progress in 0..1, as tensors that are updated in place."""

    def __init__(self, args: argparse.Namespace) -> None:
        values = {"weight_rounding": 0.0, "act_rounding": 0.0, "dropout": args.dropout, "dense": 1.0}
        self.knobs = Knobs(
            **{name: torch.tensor(value, device=args.device) for name, value in values.items()},
            swiglu_limit=torch.tensor(args.swiglu_limit, device=args.device),
        )
        self.scale = 0.0

    def move(self, step: int, progress: float) -> None:
        """Set the rates and switches for this step."""
        self.scale = min((step + 1) / 100, 1.0, max(1.0 - progress, 0.0) / 0.6)
        share = min(max((progress - 0.65) / 0.1, 0.0), 1.0)
        self.knobs.weight_rounding.fill_(share)
        self.knobs.act_rounding.fill_(share)
        self.knobs.dense.fill_(float(progress < 0.25))

    def quiet(self, rounding: float | None = None) -> Knobs:
        """Return the switches for an evaluation: no dropout, and this much activation rounding."""
        knobs = self.knobs._replace(dropout=torch.zeros_like(self.knobs.dropout))
        if rounding is None:
            return knobs
        zero = torch.zeros_like(knobs.dense)
        return knobs._replace(weight_rounding=zero, act_rounding=zero + rounding, dense=zero)


def optimisers(model: torch.nn.Module, args: argparse.Namespace) -> tuple[Muon, torch.optim.AdamW]:
    """Return Muon for the layers' projections and AdamW for the rest."""
    named = dict(model.named_parameters())
    small = ("_hc.", "gate.weight", "weights_proj", "position_bias", "norm")
    muon = {
        n: p for n, p in named.items() if ".layers." in n and p.ndim > 1 and not any(s in n for s in small)
    }
    rest = [p for n, p in named.items() if n not in muon]
    adam = torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.01, fused=args.device == "cuda")
    return Muon(muon, weight_decay=args.weight_decay), adam


def balance(model: torch.nn.Module, loads: Tensor, rate: float) -> None:
    """Move each router's bias against its experts' loads (DeepSeek-V3's auxiliary-loss-free rule)."""
    for layer, share in zip(model.model.layers, loads, strict=True):
        if not layer.mlp.is_hash:
            layer.mlp.gate.e_score_correction_bias.add_(torch.sign(1 - share), alpha=rate)


def train(
    model: torch.nn.Module, nano: Nano, documents: list, held_out: Tensor, args: argparse.Namespace
) -> dict:
    """Run the clock down; return the record of the run. The model's parameters are changed in place."""
    batches, schedule = Batches(documents, args), Schedule(args)
    muon, adam = optimisers(model, args)
    ctx = context(nano.rotary, args.length, args.device)
    dtype = torch.bfloat16
    record: dict = {"curve": [], "chat_rows": batches.chat_rows, "text_rows": batches.text_rows}
    losses: list[Tensor] = []
    step, start, last_eval, compile_start = -2, time.time(), 0.0, time.time()
    while True:
        if step == 0:  # the two steps before compile and change nothing
            record["compile_seconds"] = time.time() - compile_start
            start = time.time()
        progress = step / args.steps if args.steps else (time.time() - start) / args.seconds
        if step > 0 and progress >= 1:
            break
        schedule.move(step, progress if step >= 0 else 0.0)
        ids, labels = labelled(batches.next())
        logits, kl, loads = nano(corrupt(ids, args.noise), ctx, schedule.knobs, dtype)
        loss = loss_sum(logits, labels) / (labels >= 0).sum()
        (loss + kl.sum()).backward()
        if step >= 0:
            muon.step(args.muon_lr * schedule.scale)
            for group in adam.param_groups:
                group["lr"] = args.adam_lr * schedule.scale
            adam.step()
            balance(model, loads, 1e-3 * schedule.scale)
            losses.append(loss.detach())
        model.zero_grad(set_to_none=True)
        elapsed = time.time() - start
        if step >= 0 and (step == 0 or elapsed - last_eval >= args.eval_every):
            last_eval = elapsed
            held = nats_per_byte(nano, held_out, ctx, schedule.quiet(), dtype, args.batch)
            point = {
                "seconds": round(elapsed, 1),
                "step": step + 1,
                "passes": batches.passes,
                "held_out": held,
            }
            point |= {
                "train": torch.stack(losses).mean().item(),
                "index_kl": [round(k, 4) for k in kl.tolist() if k],
            }
            point |= {
                "max_load": round(loads[2:].max().item(), 2),
                "rounding": schedule.knobs.weight_rounding.item(),
            }
            record["curve"].append(point)
            losses.clear()
            print(json.dumps(point), flush=True)
            if not math.isfinite(held):
                raise FloatingPointError("the held-out loss is not finite")
            torch.save(model.state_dict(), args.out / "masters.pt")
        step += 1
    tokens = step * args.batch * args.length
    return record | {
        "steps": step,
        "tokens": tokens,
        "seconds": time.time() - start,
        "passes": batches.passes,
    }


def report(model: torch.nn.Module, nano: Nano, held_out: Tensor, args: argparse.Namespace) -> dict:
    """Store the weights and measure them: the FP32 masters, then what was stored."""
    torch.set_float32_matmul_precision("highest")
    ctx = context(nano.rotary, args.length, args.device)
    quiet = Schedule(args).quiet
    batch = min(8, args.batch)
    nats = {"fp32": nats_per_byte(nano, held_out, ctx, quiet(0.0), torch.float32, batch)}
    save(model.state_dict(), args.out)
    model.load_state_dict(load(args.out))
    nats["stored"] = nats_per_byte(nano, held_out, ctx, quiet(0.0), torch.float32, batch)
    nats["stored_with_training_rounding"] = nats_per_byte(
        nano, held_out, ctx, quiet(1.0), torch.float32, batch
    )
    long = held_out[(held_out >= 0).sum(-1) > 1500][:40]
    few = long[:8]
    sample = eval_rows(read_sample(args.out / "heldout.txt")[:2], CHECK_BYTES + 1)[[0]]
    check = transformers_nats(model, torch.from_numpy(sample).to(args.device))[0] / CHECK_BYTES
    sums, bytes_of_few = transformers_nats(model, few), (few[:, 1:] >= 0).sum(-1)
    return {
        "nats_per_byte": nats,
        "bits_per_byte": {name: value / math.log(2) for name, value in nats.items()},
        "transformers_stored_nats_first_long_rows": sum(sums) / bytes_of_few.sum().item(),
        "ours_stored_nats_first_long_rows": nats_per_byte(nano, few, ctx, quiet(0.0), torch.float32, batch),
        "check": {"bytes_of_first_sample_file": CHECK_BYTES, "stored_nats_per_byte": check},
        "recall": recall(nano, long, ctx, quiet(1.0)),
        "clamp": clamp_hits(nano, long[:8], ctx, quiet(0.0)),
        "answers": answers(model, args.device, 400 if args.device == "cuda" else 2),
    }


def main() -> None:
    """Train, store, measure and write the record."""
    args = options()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    train_documents, held_documents = split()
    held_out = torch.from_numpy(eval_rows(held_documents, args.length + 1)).to(args.device)
    if args.steps:
        held_out = held_out[: args.batch]
    model = build(args)
    record = {"args": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}}
    record |= {
        "data": summary(train_documents, held_documents),
        "date": time.strftime("%Y-%m-%d"),
        "seed": SEED,
    }
    record["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
    record["versions"] |= {"transformers": transformers.__version__}
    record["gpu"] = torch.cuda.get_device_name() if args.device == "cuda" else "none"
    record["parameters"] = sum(p.numel() for p in model.parameters())
    record |= train(model, Nano(model, compiled=args.device == "cuda"), train_documents, held_out, args)
    record["heldout_sample"] = write_sample(held_documents, args.out / "heldout.txt")
    record |= report(model, Nano(model), held_out, args)
    config = json.loads((HERE / "config.json").read_text()) | {"swiglu_limit": args.swiglu_limit}
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if args.out.resolve() != HERE:
            shutil.copy(HERE / name, args.out / name)
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(
        json.dumps(
            {k: record[k] for k in ("nats_per_byte", "recall", "steps", "tokens", "seconds")}, indent=1
        )
    )


if __name__ == "__main__":
    main()
