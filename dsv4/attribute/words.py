"""Which ops of an attribution stand out, and the attribution in one line. Imports no torch."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Entry = Mapping[str, Any]
ERRORS = 2.0  # standard errors of its own that a share must be over
FEW = 5  # ops; of fewer there is no spread to compare with
SPREADS = 3.0
OF_A_DEVIATION = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


def standing_out(ops: Sequence[Entry]) -> list[Entry]:
    """Ops that return more than chance, in their order.

    Any swap draws anew the rounding noise of all that follows. Where a few positions near a tie hold the KL, this alone
    returns a good part of it, whichever op is swapped: half of it each on nano's lowest rung, where the KL is noise.
    So an op must be over the ops' median by three standard deviations, estimated by the median absolute deviation,
    which a few guilty ops do not widen; and over two standard errors of its own.

    Parameters
    ----------
    ops : see :func:`dsv4.attribute.rank.rank`.
    """
    run = [entry for entry in ops if not entry["same_bits"] and entry["returned"] is not None]
    shares, bar = [entry["returned"] for entry in run], 0.0
    if len(shares) >= FEW:
        middle = median(shares)
        bar = middle + SPREADS * OF_A_DEVIATION * median(abs(share - middle) for share in shares)
    return [entry for entry in run if entry["returned"] > max(bar, ERRORS * (entry["se"] or 0.0))]


def words(ops: Sequence[Entry], layers: Sequence[Entry]) -> str:
    """``layer 5, index_topk: 83% of the KL``.

    Parameters
    ----------
    ops, layers : see :func:`dsv4.attribute.rank.rank`, most returned first.

    Returns
    -------
    str
        The first op, at its first layer if that returns half of what the op returns in all layers; or that none
        stands out.
    """
    first = next(iter(standing_out(ops)), None)
    if first is None:
        return _none(ops)
    share = f"{first['returned']:.0%} of the KL"
    apart = next((entry for entry in layers if entry["op"] == first["op"]), None)
    if apart is None:
        return f"{first['op']}: {share}"
    alone = apart["returned"] or 0.0
    if alone < first["returned"] / 2:
        return f"{first['op']} in all layers: {share}, layer {apart['layer']} alone {alone:.0%}"
    at = f"layer {apart['layer']}, " if isinstance(apart["layer"], int) else ""
    return f"{at}{first['op']}: {alone:.0%} of the KL"


def _none(ops: Sequence[Entry]) -> str:
    shares = [entry["returned"] for entry in ops if entry["returned"] is not None and not entry["same_bits"]]
    if not shares or max(shares) <= 0:
        return "no op alone returns any of the KL"
    first = next(entry["op"] for entry in ops if entry["returned"] == max(shares))
    return (
        f"no op stands out: {first} returns {max(shares):.0%} of the KL, and half of the ops return"
        f" {median(shares):.0%} or more"
    )
