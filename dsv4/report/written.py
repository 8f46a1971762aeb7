"""What an audit's rungs wrote and how it was judged: look-ups that the section's words and tables share."""

from collections.abc import Iterator, Mapping
from typing import Any

from dsv4.ladder import Variant
from dsv4.report.load import Audit
from dsv4.report.text_cells import Text


def writers(audit: Audit) -> list[Variant]:
    """Rungs with a text of their own, parents first."""
    return [rung for rung in audit.ladder if any(True for _ in free_texts(audit, rung.id))]


def free_texts(audit: Audit, variant: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Prompts that a variant continued freely, with their entries in ``text/<variant>.json``."""
    document = audit.texts.documents.get(variant) or {"prompts": {}}
    return ((name, entry) for name, entry in document["prompts"].items() if entry["own"])


def text_below(audit: Audit, rung: Variant, prompt: str) -> Text | None:
    """What the nearest rung below wrote for a prompt; None if none of them wrote a text."""
    parents = {other.id: other.parent for other in audit.ladder}
    below = rung.parent
    while below is not None:
        entry = dict(free_texts(audit, below)).get(prompt)
        if entry:
            return entry["own"]
        below = parents.get(below)
    return None


def prompts_of(documents: Mapping[str, Any]) -> dict[str, str]:
    """Prompts of all texts with their kinds, in order."""
    return {
        name: found["kind"] for document in documents.values() for name, found in document["prompts"].items()
    }


def reference_of(audit: Audit, prompt: str) -> Text:
    """Find the reference's own text of a prompt."""
    return next(
        document["prompts"][prompt]["reference"]
        for document in audit.texts.documents.values()
        if prompt in document["prompts"]
    )


def longest_text(audit: Audit, prompt: str) -> int:
    """Tokens of a prompt's longest text."""
    found = [document["prompts"].get(prompt) for document in audit.texts.documents.values()]
    texts = [text for entry in found if entry for text in (entry["reference"], entry["own"]) if text]
    return max(text["length"] for text in texts)


def judgement(audit: Audit, variant: str) -> Mapping[str, Any]:
    """Judgement of a rung's forced text, ``e2e.text`` of its verdict, or nothing."""
    return ((audit.verdicts.get(variant) or {}).get("e2e") or {}).get("text") or {}
