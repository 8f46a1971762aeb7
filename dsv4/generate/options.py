"""Options of ``python -m dsv4 generate``, as :mod:`dsv4.__main__` takes them. Imports no torch."""

from typing import Any

OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--rung", {"metavar": "ID", "help": "a rung of the ladder (default: the reference `trained`, on refs)"}),
    ("--prompt", {"metavar": "TEXT", "help": "continue this text"}),
    (
        "--chat",
        {"nargs": "+", "metavar": "TEXT", "help": "ask this; each further TEXT is the user's next turn"},
    ),
    ("--tokens", {"type": int, "default": 512, "help": "most tokens of a text (default: 512)"}),
    ("--temperature", {"type": float, "default": 0.0, "help": "0, the default, is greedy"}),
    ("--top-p", {"type": float, "default": 1.0, "help": "draw from the likeliest tokens of this share"}),
    ("--seed", {"type": int, "help": "of each text's draws (default: the configuration's)"}),
    (
        "--stop",
        {"action": "append", "default": [], "metavar": "STR", "help": "end where this text would begin"},
    ),
    ("--chunk", {"type": int, "default": 512, "help": "rows of a prefill pass (default: 512)"}),
)
