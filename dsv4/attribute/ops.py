"""The ops that attribution swaps, and where they are. Imports no torch.

An op is a stage of :data:`dsv4.taps.STAGES`, at one layer or at all that have it. Stages that make sense only
together are one op (:data:`GROUPS`). The first streams' store, which no stage does, is the op ``embed``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from dsv4.taps import MODEL, STAGES

EMBED = "embed"
Layer = int | str
Place = tuple[Layer, str]  # layer, or "model"; op


@dataclass(frozen=True, kw_only=True)
class Group:
    """Stages that are swapped together, and why one alone computes nothing that either model means."""

    stages: tuple[str, ...]
    why: str

    @property
    def name(self) -> str:
        """Name of the op."""
        return "+".join(self.stages)


# Everything else that passes between stages says itself what it is: an activation holds its own row scale, a record
# of KV is decoded by the store that holds it, and q, entries and streams are values.
GROUPS: tuple[Group, ...] = (
    Group(
        stages=("index_k_store", "index_score"),
        why="the reference's keys lie rotated by Hadamard in FP4, and its query is rotated to meet them; a plan's lie"
        " unrotated in FP8. A query of one basis scores keys of the other at random",
    ),
)


def _ops() -> dict[str, tuple[str, ...]]:
    grouped = {stage: group for group in GROUPS for stage in group.stages}
    ops: dict[str, tuple[str, ...]] = {EMBED: ()}
    for stage in STAGES:
        group = grouped.get(stage)
        ops[group.name if group else stage] = group.stages if group else (stage,)
    return ops


OPS: Mapping[str, tuple[str, ...]] = MappingProxyType(_ops())  # name -> its stages, in the order of a pass


def places(layers: Sequence[Sequence[str]], head: Sequence[str]) -> dict[str, list[Place]]:
    """Where each op is: op -> its places, lowest first.

    Parameters
    ----------
    layers : the names of each layer's stages.
    head : those of the head's.
    """
    found: dict[str, list[Place]] = {}
    for op, stages in OPS.items():
        at: list[Place] = [
            (layer, op) for layer, names in enumerate(layers) if stages and set(stages) <= set(names)
        ]
        if op == EMBED or (stages and set(stages) <= set(head)):
            at = [(MODEL, op)]
        if at:
            found[op] = at
    return found
