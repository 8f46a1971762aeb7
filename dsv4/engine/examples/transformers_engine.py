"""transformers' ``DeepseekV4ForCausalLM`` as an engine: hooks record its modules and cut between them.

What an engineer writes for a model in PyTorch: a hook a tap, that keeps what the module gave and
lets the reference's value go on in its place. A sequence runs in one call, without a cache.
Started by the audit: ``python -m dsv4.engine.examples.transformers_engine [--fault NAME] JOB``.
"""

import argparse
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from dsv4.engine.examples.transformers_model import load_model
from dsv4.engine.tap_writer import MODEL, Job, Put, Taps, serve

LAST = torch.iinfo(torch.int64).max  # sorts behind every entry's number
attend = modeling.eager_attention_forward


class LayerTaps:
    """Hooks of one block; a context manager.

    Attributes
    ----------
    taps : tap -> what the block gave, one line a row of the sequence (or an entry).
    """

    def __init__(self, block: Any, rows: Tensor, given: Mapping[str, Tensor]) -> None:
        self.block, self.rows, self.given = block, rows, given
        self.taps: dict[str, Tensor] = {}

    def tap(self, name: str, value: Tensor) -> Tensor:
        """Keep a value; what goes on is the reference's, where it is given."""
        self.taps[name] = value
        if f"history.{name}" in self.given:
            return self.given[f"history.{name}"]
        if name not in self.given:
            return value
        value = value.clone()
        value[self.rows] = self.given[name].to(value.dtype)
        return value

    def __enter__(self) -> "LayerTaps":
        block, attn, mlp = self.block, self.block.self_attn, self.block.mlp
        attn.taps = self
        results: dict[str, Any] = {
            "attn_in": block.input_layernorm,
            "qr": attn.q_a_norm,
            "moe_in": block.post_attention_layernorm,
        }
        results |= {"routed": mlp.experts, "shared": mlp.shared_experts, "moe_out": mlp}
        after: dict[Any, Any] = {module: self.result(name) for name, module in results.items()}
        after |= {block.attn_hc: self.mhc("attn"), block.ffn_hc: self.mhc("moe"), mlp.gate: self.route}
        after[attn] = lambda m, args, out: (self.tap("attn_proj", out[0][0])[None], out[1])
        after[block] = lambda m, args, out: self.tap("streams", out[0])[None]
        before: dict[Any, Any] = {block.ffn_hc: lambda m, args: (self.tap("streams_mid", args[0][0])[None],)}
        before[attn.o_a_proj] = self.attn_out
        if attn.compressor is not None:
            after[attn.compressor] = lambda m, args, out: (self.tap("comp", out[0][0, 0])[None, None], out[1])
        indexer = getattr(attn.compressor, "indexer", None)
        if indexer is not None:
            after |= {
                indexer: self.topk,
                indexer.scorer: self.scores,
                indexer.scorer.weights_proj: self.index_w,
            }
            before[indexer.scorer] = self.index_operands
        self.hooks = [module.register_forward_hook(hook) for module, hook in after.items()]
        self.hooks += [module.register_forward_pre_hook(hook) for module, hook in before.items()]
        return self

    def __exit__(self, *_: object) -> None:
        del self.block.self_attn.taps
        for hook in self.hooks:
            hook.remove()

    def result(self, name: str) -> Callable[..., Tensor]:
        """Hook of what a module returns, (1, T, D) or (T, D)."""
        return lambda module, args, out: self.tap(name, out.view(-1, out.shape[-1])).view_as(out)

    def mhc(self, site: str) -> Callable[..., Any]:
        """Hook of post (1, T, N), comb (1, T, N, N) and the collapsed streams, which the norm's tap shows."""
        return lambda module, args, out: (
            self.tap(f"{site}_post", out[0][0])[None],
            self.tap(f"{site}_comb", out[1][0])[None],
            out[2],
        )

    def attn_out(self, module: Any, args: Any) -> Any:
        """What o_a reads: heads (1, T, G, H / G * K)."""
        heads = args[0][0].flatten(1).unflatten(-1, (-1, self.block.self_attn.head_dim))
        return (self.tap("attn_out", heads).reshape(args[0].shape),)

    def route(self, module: Any, args: Any, out: Any) -> Any:
        """Scores, experts in ascending order, and their weights, of the experts that go on."""
        logits, weights, ids = out
        scores, (own, order) = self.tap("router_scores", module.score_fn(logits)), ids.sort(-1)
        ids = self.tap("expert_ids", own)
        chosen = scores.gather(1, ids)
        others = chosen / chosen.sum(-1, keepdim=True) * module.routed_scaling_factor
        same = (ids == own).all(-1, keepdim=True)
        return logits, self.tap("expert_weights", torch.where(same, weights.gather(1, order), others)), ids

    def index_w(self, module: Any, args: Any, out: Tensor) -> Tensor:
        """Head weights (1, T, H), scaled as the tap has them."""
        scorer = self.block.self_attn.compressor.indexer.scorer
        scale = scorer.weights_scaling * scorer.softmax_scale
        return self.tap("index_w", out[0] * scale)[None] / scale

    def index_operands(self, module: Any, args: Any) -> Any:
        """Queries (1, T, H, D) and keys (1, C, D)."""
        return self.tap("index_q", args[0][0])[None], self.tap("index_k", args[1][0])[None], args[2]

    def scores(self, module: Any, args: Any, out: Tensor) -> Tensor:
        """Scores (1, T, C); entries that a row does not see are hidden."""
        visible = (torch.arange(out.shape[1]) + 1) // self.block.self_attn.compressor.compress_rate
        hidden = torch.arange(out.shape[2]) >= visible[:, None]
        return self.tap("index_scores", out[0].masked_fill(hidden, -torch.inf))[None]

    def topk(self, module: Any, args: Any, out: Tensor) -> Tensor:
        """Entries that a row attends to (1, T, k): ascending, then -1."""
        ids = torch.where(out[0] < 0, LAST, out[0]).sort(-1).values
        ids = torch.where(ids == LAST, -1, ids)
        ids = torch.nn.functional.pad(ids, (0, module.index_topk - ids.shape[1]), value=-1)
        return self.tap("topk", ids)[None]

    def attend(self, module: Any, query: Tensor, key: Tensor, *args: Any, **options: Any) -> Any:
        """The model's attention on what goes on: q (1, H, T, K), window rows then compressed ones (1, 1, S, K)."""
        rows = query.shape[2]
        query = self.tap("q", query[0].transpose(0, 1)).transpose(0, 1)[None]
        key = torch.cat((self.tap("kv", key[0, 0, :rows]), key[0, 0, rows:]))[None, None]
        return attend(module, query, key, key, *args[1:], **options)


def attended(module: Any, *operands: Any, **options: Any) -> Any:
    """Attention of a block with hooks, or of one without."""
    hooked = getattr(module, "taps", None)
    return (
        attend(module, *operands, **options)
        if hooked is None
        else hooked.attend(module, *operands, **options)
    )


class Engine:
    """The model behind ``run_layer`` and ``run``."""

    def __init__(self, job: Job) -> None:
        self.job, self.model = job, load_model(Path(job.content["checkpoint"]))
        self.seen: dict[bytes, Any] = {}
        modeling.eager_attention_forward = attended

    def arguments(self, tokens: np.ndarray) -> Any:
        """What the model hands to its blocks for these tokens: positions, rotations, mask."""
        key = tokens.tobytes()
        if key not in self.seen:
            block, found = self.model.model.layers[0], {}
            keep = block.register_forward_pre_hook(
                lambda m, a, kwargs: found.update(kwargs), with_kwargs=True
            )
            self.model(torch.tensor(tokens)[None])
            keep.remove()
            self.seen[key] = found
        return self.seen[key]

    def run_layer(
        self, layer: int | str, inputs: dict[str, np.ndarray], choices: dict[str, np.ndarray]
    ) -> Taps:
        """One layer, or the head, on the reference's inputs."""
        given = {name: torch.tensor(value) for name, value in (inputs | choices).items()}
        rows, streams, tokens = given.pop("rows"), given.pop("streams_in"), inputs["sequence"]
        if layer == MODEL:
            hidden = self.model.model.norm(self.model.model.hc_head(streams[None]))[0]
            return {"hidden": hidden.numpy(), "logits": self.model.lm_head(given["hidden"]).numpy()}
        whole = torch.zeros(1, len(tokens), *streams.shape[1:])
        whole[0, rows] = streams
        with LayerTaps(self.model.model.layers[int(layer)], rows, given) as hooked:
            hooked.block(whole, **self.arguments(tokens))
        entries = [] if "history.kv" not in given else self.entries(tokens, int(layer))
        return chosen(hooked.taps, rows, entries)

    def run(self, prompt: dict[str, Any], put: Put) -> None:
        """A prompt and the tokens that the reference continued it with, all layers at once."""
        tokens, rows = torch.tensor(prompt["tokens"]), torch.tensor(prompt["rows"])
        with ExitStack() as stack:
            layers = [stack.enter_context(LayerTaps(block, rows, {})) for block in self.model.model.layers]
            norm = self.model.model.norm
            hidden: list[Tensor] = []
            stack.callback(norm.register_forward_hook(lambda m, args, out: hidden.append(out[0])).remove)
            logits = self.model(tokens[None]).logits[0]
        for layer, hooked in enumerate(layers):
            wanted = self.job.content["taps"]["compounded"][str(layer)]
            taps = {name: value for name, value in hooked.taps.items() if name in wanted}
            put(layer, chosen(taps, rows, self.entries(tokens.numpy(), layer)))
        put(MODEL, {"hidden": hidden[0][rows].numpy(), "logits": logits[rows].numpy()})

    def run_batch(self, prompts: list[dict[str, Any]]) -> list[np.ndarray]:
        """Prompts as one batch: padded on the right, where no row looks."""
        sizes = [prompt["prompt_tokens"] for prompt in prompts]
        tokens = [torch.tensor(prompt["tokens"][:size]) for prompt, size in zip(prompts, sizes, strict=True)]
        logits = self.model(torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)).logits
        rows = ([row for row in prompt["rows"] if row < prompt["prompt_tokens"]] for prompt in prompts)
        return [one[kept].numpy() for one, kept in zip(logits, rows, strict=True)]

    def entries(self, tokens: np.ndarray, layer: int) -> list[int]:
        """Entries of a layer that are judged for the prompt of these tokens."""
        ratio = getattr(self.model.model.layers[layer].self_attn.compressor, "compress_rate", 0)
        prompts = (prompt for prompt in self.job.content["prompts"] if prompt["tokens"] == tokens.tolist())
        return next(prompts)["entries"].get(str(ratio), [])


def chosen(taps: Mapping[str, Tensor], rows: Tensor, entries: list[int]) -> Taps:
    """Judged rows and entries of what was kept."""
    return {
        name: value[entries if name in ("comp", "index_k") else rows].numpy() for name, value in taps.items()
    }


def plant(model: Any, fault: str) -> None:
    """Break the model for the audit's own tests; nothing to copy."""
    block = model.model.layers[0]
    if fault == "sink":
        block.self_attn.sinks.fill_(-torch.inf)
    elif fault == "scaling":
        block.mlp.gate.routed_scaling_factor = 1.0
    elif fault == "rope":
        rotate = modeling.apply_rotary_pos_emb
        modeling.apply_rotary_pos_emb = lambda x, cos, sin, *more: rotate(x, cos, -sin, *more)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    """Do the job that the last argument names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=("sink", "scaling", "rope"), default="")
    parser.add_argument("job")
    options = parser.parse_args(arguments)
    job = Job(options.job)
    engine = Engine(job)
    plant(engine.model, options.fault)
    device, version = "cpu, FP32, eager", f"transformers {transformers.__version__}"
    entry = "DeepseekV4ForCausalLM.forward"
    serve(
        job,
        engine.run_layer,
        engine.run,
        engine.run_batch,
        device=device,
        version=version,
        batched_prefill=entry,
    )


if __name__ == "__main__":
    main()
