"""What every computing stage starts from: configuration, checkpoint, prompts, identity of a run."""

import argparse
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsv4.config import Config, backend_of, checkpoint_sha256, load
from dsv4.device import Backend
from dsv4.identity import git_state, versions
from dsv4.model.checkpoint import Checkpoint
from dsv4.model.checkpoint import load as load_checkpoint
from dsv4.model.numerics import Numerics, of_plan
from dsv4.model.transformer import Transformer
from dsv4.plan import Plan, flatten
from dsv4.prompts import Prompt, encode_all, load_prompts, token_sha256
from dsv4.run.watch import Watch


@dataclass(frozen=True)
class Setup:
    """One stage's inputs, loaded and checked.

    Attributes
    ----------
    config : the audit's configuration.
    results : ``results/<run>``.
    checkpoint : the loaded model.
    tokens : id -> token ids of the prompts with taps.
    prompts : id -> prompt, with taps or without.
    texts : id -> token ids of the prompts that are continued.
    """

    config: Config
    results: Path
    checkpoint: Checkpoint
    tokens: dict[str, list[int]]
    prompts: dict[str, Prompt]
    texts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def backend(self) -> Backend:
        """What variants run on."""
        return backend_of(self.config)

    def variant_model(self, plan: Plan, watch: Watch | None = None) -> Transformer:
        """Return the checkpoint's model under a plan, on the backend of variants.

        Parameters
        ----------
        plan : Plan
        watch : what looks at values that no tap shows, or None.

        Raises
        ------
        NoKernelError
            The backend is kernels, and the plan, a size or a stored format has none.
        """
        config, page_size = self.checkpoint.config, self.config.page_size
        if self.backend.kind == "ref":
            num = of_plan(plan, config)
            return self.model(watch.over(num) if watch else num)
        from dsv4.backend.start import kernel_model

        weights, device = self.checkpoint.weights, self.backend.device
        return kernel_model(config, weights, plan, page_size=page_size, device=device, watch=watch)

    def model(self, numerics: Numerics) -> Transformer:
        """Return the checkpoint's model under some numerics, on refs: references, and what is compared with them."""
        weights = self.checkpoint.weights
        return Transformer(self.checkpoint.config, weights, numerics, page_size=self.config.page_size)

    def identity(self, prompt: str) -> dict[str, Any]:
        """Attributes by which a dump is known to belong to this run and prompt."""
        return {
            "checkpoint": checkpoint_sha256(self.config.checkpoint),
            "prompt": token_sha256(self.tokens[prompt]),
        }

    def attrs(self, prompt: str, kind: str, variant: str, plan: Plan | None) -> dict[str, Any]:
        """All attributes of a dump of one prompt."""
        return self.identity(prompt) | {"prompt_id": prompt} | self.origin(kind, variant, plan)

    def origin(self, kind: str, variant: str, plan: Plan | None) -> dict[str, Any]:
        """Attributes of a dump that do not depend on its prompt: whose numbers they are, and what computed them."""
        commit, dirty = git_state()
        return {
            "checkpoint": checkpoint_sha256(self.config.checkpoint),
            "kind": kind,
            "variant": variant,
            "plan": flatten(plan) if plan else {},
            "compress_ratios": list(self.checkpoint.config.compress_ratios),
            "n_rope": self.checkpoint.config.qk_rope_head_dim,
            "commit": commit,
            "dirty": dirty,
            "device": f"cpu ({platform.processor() or platform.machine()})",
            "versions": versions(),
            "seed": self.config.seed,
            "label": "emulated on cpu",
            "backend": "ref",
        } | (self._of_kernels() if kind == "variant" and plan is not None else {})

    def _of_kernels(self) -> dict[str, Any]:
        """Attributes of a variant's dump that kernels write otherwise; none on refs."""
        backend = self.backend
        if backend.kind == "ref":
            return {}
        number = "sm_{}{}".format(*backend.capability) if backend.capability else "no GPU"
        return {
            "backend": "kernel",
            "device": f"{backend.name} ({number})",
            "label": f"kernels on {backend.name}",
        }


def parse(
    description: str,
    arguments: Sequence[str] | None,
    *,
    variant: bool = False,
    flags: Mapping[str, str] | None = None,
) -> argparse.Namespace:
    """Parse the options that the stages share, and ``flags`` of one: name -> help."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, required=True, help="the audit's config.yaml")
    parser.add_argument("--results", type=Path, required=True, help="results/<run>")
    if variant:
        parser.add_argument("--variant", required=True, help="a rung of the ladder")
    for name, text in (flags or {}).items():
        parser.add_argument(name, action="store_true", help=text)
    return parser.parse_args(arguments)


def prepare(config_path: Path, results: Path) -> Setup:
    """Load and check everything a computing stage needs.

    Raises
    ------
    ConfigError, CheckpointError
        What is wrong, where, and what to do.
    """
    torch.set_grad_enabled(False)
    torch.set_flush_denormal(False)
    config = load(config_path)
    prompts = {prompt.id: prompt for prompt in load_prompts(config.prompts)}
    tokens = encode_all(config)
    return Setup(
        config=config,
        results=results,
        checkpoint=load_checkpoint(config.checkpoint),
        tokens={name: ids for name, ids in tokens.items() if prompts[name].has_taps},
        prompts=prompts,
        texts={name: ids for name, ids in tokens.items() if prompts[name].has_text},
    )
