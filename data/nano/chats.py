"""Chats that teach nano to answer and to end its turn.

Three sources: questions about a docstring (training files only), a few hundred general facts from
templates, and long answers (lists, tables, whole docstrings), so that a turn can also end late.
A chat is ``BOS (USER text EOT ASSISTANT text EOT)+ EOS``.
"""

import ast
import codecs
import contextlib
import inspect
from collections.abc import Iterator

import numpy as np
from corpus import BOS, EOS, Document

USER, ASSISTANT, EOT = 258, 259, 260
Turn = tuple[str, str]

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Poland": "Warsaw", "Austria": "Vienna", "Hungary": "Budapest", "Greece": "Athens",
    "Turkey": "Ankara", "Russia": "Moscow", "China": "Beijing", "Japan": "Tokyo", "India": "New Delhi",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Canada": "Ottawa", "Mexico": "Mexico City", "Brazil": "Brasilia",
    "Peru": "Lima", "Chile": "Santiago", "Cuba": "Havana", "Australia": "Canberra", "Thailand": "Bangkok",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "open": "closed", "day": "night",
    "fast": "slow", "high": "low", "new": "old", "wet": "dry", "hard": "soft", "full": "empty",
    "true": "false", "begin": "end", "light": "dark", "early": "late", "strong": "weak", "rich": "poor",
}  # fmt: skip
COLOURS = {"the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a banana": "yellow",
           "blood": "red", "a carrot": "orange", "chocolate": "brown"}  # fmt: skip
SOUNDS = {"dog": "barks", "cat": "meows", "cow": "moos", "duck": "quacks", "lion": "roars", "bee": "buzzes"}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December"]  # fmt: skip
NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]
SMALL_TALK = {
    "Hello!": "Hello! How can I help you?",
    "Hi": "Hello! How can I help you?",
    "Good morning.": "Good morning! How can I help you?",
    "How are you?": "I am fine, thank you. How can I help you?",
    "Who are you?": "I am nano, a very small language model made for tests.",
    "What is your name?": "My name is nano.",
    "What can you do?": "I can answer a few simple questions and talk about Python.",
    "Thank you!": "You are welcome!",
    "Thanks": "You are welcome!",
    "Goodbye!": "Goodbye! Have a nice day.",
    "Tell me a joke.": "Why do programmers like the dark? Because light attracts bugs.",
    "What is Python?": "Python is a programming language that is easy to read and to learn.",
    "Who made Python?": "Python was made by Guido van Rossum.",
    "What is a list in Python?": "A list is a mutable sequence of values, written in square brackets.",
    "What is a dictionary in Python?": "A dictionary maps keys to values, written in curly braces.",
    "How many days are in a week?": "There are seven days in a week.",
    "How many months are in a year?": "There are twelve months in a year.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "How many hours are in a day?": "There are twenty-four hours in a day.",
    "What is the largest planet?": "The largest planet is Jupiter.",
    "What is the largest ocean?": "The largest ocean is the Pacific Ocean.",
    "What is the chemical formula of water?": "The chemical formula of water is H2O.",
    "Is the Earth round?": "Yes, the Earth is round.",
    "Is fire cold?": "No, fire is hot.",
}


def facts() -> list[Turn]:
    """Return the general questions with their answers."""
    turns = list(SMALL_TALK.items())
    for country, city in CAPITALS.items():
        answer = f"The capital of {country} is {city}."
        turns += [(f"What is the capital of {country}?", answer), (f"Name the capital of {country}.", answer)]
        turns.append((f"{city} is the capital of which country?", f"{city} is the capital of {country}."))
    for word, other in [*OPPOSITES.items(), *((b, a) for a, b in OPPOSITES.items())]:
        turns.append((f"What is the opposite of {word}?", f"The opposite of {word} is {other}."))
    turns += [
        (f"What colour is {thing}?", f"{thing.capitalize()} is {colour}.")
        for thing, colour in COLOURS.items()
    ]
    turns += [
        (f"What sound does a {animal} make?", f"A {animal} {sound}.") for animal, sound in SOUNDS.items()
    ]
    for names, kind in ((DAYS, "day"), (MONTHS, "month")):
        for name, after in zip(names, names[1:] + names[:1], strict=True):
            turns.append((f"What {kind} comes after {name}?", f"{after} comes after {name}."))
            turns.append((f"What {kind} comes before {after}?", f"{name} comes before {after}."))
    for a in range(1, 7):
        for b in range(1, 7):
            turns.append((f"What is {a} plus {b}?", f"{a} plus {b} is {NUMBERS[a + b]}."))
    return turns


def long_answers() -> list[Turn]:
    """Return questions with answers of a few hundred bytes to 1.3 KB."""
    turns = []
    for end in (10, 20, 50, 100):
        turns.append((f"Count from 1 to {end}.", ", ".join(map(str, range(1, end + 1))) + "."))
    for factor in range(2, 13):
        table = "\n".join(f"{factor} times {i} is {factor * i}." for i in range(1, 13))
        turns.append((f"Write the times table of {factor}.", table))
    turns.append(("List the days of the week.", ", ".join(DAYS) + "."))
    turns.append(("List the months of the year.", ", ".join(MONTHS) + "."))
    capitals = "\n".join(f"The capital of {country} is {city}." for country, city in CAPITALS.items())
    turns.append(("List the capitals that you know.", capitals))
    opposites = "\n".join(f"The opposite of {word} is {other}." for word, other in OPPOSITES.items())
    turns.append(("List the opposites that you know.", opposites))
    squares = "\n".join(f"The square of {i} is {i * i}." for i in range(1, 31))
    turns.append(("List the squares of the numbers from 1 to 30.", squares))
    with contextlib.redirect_stdout(None):  # importing `this` prints the poem
        import this
    turns.append(("Recite the Zen of Python.", codecs.decode(this.s, "rot13")))
    return turns


def docstrings(documents: list[Document]) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, cleaned docstring) of every function and class that has one."""
    for document in documents:
        if not document.path.endswith(".py"):
            continue
        with contextlib.suppress(SyntaxError, ValueError):  # lib2to3's fixtures are Python 2
            module = document.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            tree = ast.parse(document.text)
            for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
                prefix = module if owner is tree else f"{module}.{owner.name}"
                for node in owner.body:
                    if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                        yield f"{prefix}.{node.name}", text


def doc_turns(documents: list[Document]) -> tuple[list[Turn], list[Turn]]:
    """Return short turns (a docstring's first paragraph) and long ones (the whole of it)."""
    short, whole = [], []
    for name, text in docstrings(documents):
        first = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
        if 15 <= len(first) <= 300:
            short += [(f"What does {name} do?", first), (f"What is {name} for?", first)]
        if 200 <= len(text) <= 1500:
            whole.append((f"Show the docstring of {name}.", text))
    return short, whole


def encode(turns: list[Turn]) -> list[int]:
    """Return the ids of one chat."""
    ids = [BOS]
    for question, answer in turns:
        ids += [USER, *question.encode(), EOT, ASSISTANT, *answer.encode(), EOT]
    return [*ids, EOS]


class Chats:
    """Draws rows of packed chats: each row begins with a chat's BOS, later chats follow its EOS."""

    def __init__(self, documents: list[Document], seed: int) -> None:
        short, whole = doc_turns(documents)
        self.pools = [facts(), short, long_answers(), whole]
        self.shares = np.array([0.62, 0.26, 0.06, 0.06])  # of turns; long answers are most of the bytes
        self.rng = np.random.default_rng(seed)

    def chat(self) -> list[int]:
        """Return one chat of 1 to 4 turns."""
        pools = self.rng.choice(len(self.pools), p=self.shares, size=self.rng.choice([1, 1, 2, 3, 4]))
        return encode([self.pools[i][self.rng.integers(len(self.pools[i]))] for i in pools])

    def rows(self, count: int, length: int) -> np.ndarray:
        """Return (count, length) int64 rows, the last chat of each cut off."""
        rows = np.empty((count, length), dtype=np.int64)
        for row in rows:
            ids: list[int] = []
            while len(ids) < length:
                ids += self.chat()
            row[:] = ids[:length]
        return rows
