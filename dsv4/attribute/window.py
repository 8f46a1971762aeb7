"""Which texts, and how much of each, attribution runs on. Imports no torch."""

from collections.abc import Mapping

import pandas as pd

# Rows of a run, prompts included. On nano a row costs 7 ms on refs (2026-12) and there are 20 to 35 runs: the ops that
# change a bit, and up to 3 of them layer by layer, which starts halfway up. So a rung takes 30 to 50 s of CPU.
ROWS = 192
LEAST = 16  # positions of a text: fewer are two blocks or less, whose spread says nothing
SHARE = 0.1  # of the first text's KL, below which another is not worth its rows


def choose(table: pd.DataFrame, prompt_tokens: Mapping[str, int], rows: int = ROWS) -> dict[str, int]:
    """Texts to run, each from its beginning, for what a swapped op stored earlier is part of its effect.

    First the text whose positions hold most of the KL, as far as ``rows`` go; then, while there is room, the next
    that holds a tenth of that. If none has room, the one with the shortest prompt, on a few positions.

    Parameters
    ----------
    table : rows of ``text/<id>.parquet``; every ``kl_nats`` is finite.
    prompt_tokens : prompt -> its tokens.
    rows : most rows of a run. A text's last token is not read: n positions take its prompt and n - 1 rows more.

    Returns
    -------
    dict
        prompt -> positions, 1 or more; empty for an empty table.
    """
    kl = {str(name): part.sort_values("step")["kl_nats"].to_numpy() for name, part in table.groupby("prompt")}
    least = {name: prompt_tokens[name] + min(LEAST, len(values)) - 1 for name, values in kl.items()}
    chosen, left, bar = dict[str, int](), rows, 0.0
    while fits := [name for name in kl if name not in chosen and least[name] <= left]:
        room = {name: min(len(kl[name]), left - prompt_tokens[name] + 1) for name in fits}
        held = {name: float(kl[name][: room[name]].sum()) for name in fits}
        best = max(fits, key=lambda name: held[name])
        if chosen and held[best] <= bar:
            break
        bar = bar or SHARE * held[best]
        chosen[best] = room[best]
        left -= prompt_tokens[best] + room[best] - 1
    if not chosen and kl:
        shortest = min(kl, key=lambda name: prompt_tokens[name])
        chosen[shortest] = min(LEAST, len(kl[shortest]))
    return chosen
