"""Whether a rung moved forced text, so that it is worth asking which op did. Imports no torch."""

import numpy as np
import pandas as pd

from dsv4.judge.text_change import paired_change


def moved(own: pd.DataFrame, parent: pd.DataFrame | None) -> bool:
    """Whether the KL to ``trained`` changed by more than chance, see :func:`~dsv4.judge.text_change.paired_change`.

    Parameters
    ----------
    own, parent : rows of ``text/<id>.parquet``, of the same prompts and steps. Without a parent, at the bottom of the
        ladder, what was changed is ``trained`` itself, whose KL is 0.

    Returns
    -------
    bool
        True too where a KL is not finite in one of the two alone.

    Raises
    ------
    ValueError
        Other positions than the parent's.
    """
    before = own.assign(kl_nats=0.0) if parent is None else parent
    whole = [bool(np.isfinite(table["kl_nats"]).all()) for table in (own, before)]
    return paired_change(own, before).moved if all(whole) else whole[0] != whole[1]
