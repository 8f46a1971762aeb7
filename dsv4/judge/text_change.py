"""Whether a change moved text: the paired difference of forced text's KL against the parent's. Imports no torch.

Neighbouring positions are correlated, so that the standard error is that of blocks: the positions of a prompt in
runs of 32, the last run shorter. With n_b positions and mean m_b a block, N = sum n_b and the mean m = sum n_b m_b / N,
the squared error is B / (B - 1) * sum (n_b (m_b - m))^2 / N^2: that of a mean over B clusters of unequal size
(Cochran, "Sampling Techniques", 3rd ed., 1977, section 9A.1).
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

BLOCK = 32  # positions
ERRORS = 3.0  # standard errors from which a difference counts
# |t| > 3 with B - 1 degrees of freedom has a probability of 0.0096 at B = 15 and of 0.0102 at B = 14: with fewer
# blocks, chance alone would move more than one text in a hundred. It is 0.0047 at 40 and 0.0027 of many.
LEAST_BLOCKS = 15
LEAST_KL = 1e-9  # nats; below, the difference is that of FP64 sums over a vocabulary


@dataclass(frozen=True)
class Change:
    """A paired difference.

    Attributes
    ----------
    mean : nats, the rung's KL less its parent's, over all positions.
    se : its standard error; None of a single block.
    blocks : how many.
    moved : whether it is more than chance: see the module.
    """

    mean: float
    se: float | None
    blocks: int
    moved: bool

    def as_dict(self) -> dict[str, Any]:
        """As ``gates.json`` has it."""
        found = asdict(self)
        return {"kl_change": found.pop("mean"), **found}


def paired_change(own: pd.DataFrame, parent: pd.DataFrame) -> Change:
    """Change of forced text's KL to ``trained``.

    Parameters
    ----------
    own, parent : rows of ``text/<id>.parquet``, of the same prompts and steps; every ``kl_nats`` is finite.

    Raises
    ------
    ValueError
        Other positions: only those of one text are pairs.
    """
    on = ["prompt", "step"]
    both = own[[*on, "kl_nats"]].merge(parent[[*on, "kl_nats"]], on=on, how="outer", suffixes=("", "_parent"))
    if both.isna().to_numpy().any() or len(both) != len(own):
        raise ValueError(f"{len(own)} and {len(parent)} positions of which some have no pair, or no KL")
    both = both.sort_values(on)
    blocks = both.groupby("prompt", sort=False).ngroup() * (1 + both["step"].max() // BLOCK)
    blocks += both["step"] // BLOCK
    mean, se, count = mean_of_blocks((both["kl_nats"] - both["kl_nats_parent"]).to_numpy(), blocks.to_numpy())
    moved = (
        count >= LEAST_BLOCKS
        and se is not None
        and abs(mean) > ERRORS * se
        and bool(both["kl_nats"].mean() > LEAST_KL)
    )
    return Change(mean, se, count, moved)


def mean_of_blocks(values: np.ndarray, blocks: np.ndarray) -> tuple[float, float | None, int]:
    """Mean of values, its standard error and the number of blocks.

    Parameters
    ----------
    values : (n,) FP64
    blocks : (n,) integer, the block of each.
    """
    _, of, sizes = np.unique(blocks, return_inverse=True, return_counts=True)
    mean, count = float(values.mean()), len(sizes)
    if count < 2:
        return mean, None, count
    away = np.bincount(of, values) - sizes * mean
    return mean, float(np.sqrt(count / (count - 1) * (away @ away)) / len(values)), count
