"""What an engine may say that a run reached: entries of ``exercised`` in its manifest and in a dump.

Our own model counts the same. What each must reach, and what it means when it does not, is the judge's:
:data:`dsv4.judge.claims_by_field.WORDS`. Imports nothing of ours.
"""

EXERCISED = (
    "swiglu_clamp_hits",
    "csa_rows_over_topk",
    "rows_over_window",
    "kv_pages",
    "batch",
    "residual_absmax",
)
