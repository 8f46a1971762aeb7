"""The section "Text, end to end": what the rungs wrote, beside the reference, and whose doing a change is.

Everything is read from ``text/``, ``gates.json`` and ``residual.json``; nothing is judged here.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dsv4.ladder import Variant
from dsv4.report import residual
from dsv4.report.digits import kl_change, number, percent
from dsv4.report.load import Audit
from dsv4.report.tables import ordered
from dsv4.report.text_cells import KINDS, Cell, Text, ended, reference_cell, rung_cell
from dsv4.report.text_findings import chosen, findings, missing
from dsv4.report.written import (
    free_texts,
    judgement,
    longest_text,
    prompts_of,
    reference_of,
    text_below,
)

TEMPLATE = "text.html.j2"
STYLE = "text.css"
NOTHING = (
    "No rung's text was looked at. It is, once a rung's gate has passed: run snakemake all, or snakemake B1 for one"
    " rung and what it stands on."
)
MOST = 4  # of the ops and layers of an attribution


@dataclass(frozen=True)
class Row:
    """A rung's line of the table.

    Attributes
    ----------
    cells : one a prompt, None where there is no text of its own; empty: forced only.
    moved : whether its KL differs from its parent's by more than its error; None: has no parent, or not judged.
    why : what its KL comes from, or whose text it took, having the same bits.
    broken : why its text is broken, or an empty text.
    """

    id: str
    spine: bool
    depth: int
    kl: str
    change: str
    top1: str
    worst: str
    cells: tuple[Cell | None, ...]
    moved: bool | None
    why: str
    broken: str


def shown(audit: Audit, left_out: Collection[str] = ()) -> dict[str, Any]:
    """All that the section says; rungs that the page has no room for cannot be chosen."""
    documents = audit.texts.documents
    rows = [rung for rung, _ in ordered(audit.ladder) if rung.id in documents]
    names = prompts_of(documents)
    there = [rung.id for rung in rows if rung.id not in left_out]
    rung, prompt = chosen(audit)
    rung = rung if rung in there else next(reversed(there), "")
    return {
        "findings": findings(audit) if documents else [],
        "nothing": "" if documents else NOTHING,
        "missing": missing(audit),
        "prompts": [(name, KINDS.get(kind, kind)) for name, kind in names.items()],
        "reference": [reference_cell(reference_of(audit, name), longest_text(audit, name)) for name in names],
        "rows": [
            _row(audit, rung, depth, names) for rung, depth in ordered(audit.ladder) if rung.id in documents
        ],
        "rungs": there,
        "rung": rung,
        "prompt": prompt,
        "ends": _ends(audit, rows),
        "attributions": _attributions(audit, rows),
        "said": [(rung.id, said) for rung in rows if (said := judgement(audit, rung.id).get("reasons"))],
        "labels": sorted({str(found.get("label")) for found in documents.values() if found.get("label")}),
        "residual": residual.shown(audit.texts.residual),
    }


def _row(audit: Audit, rung: Variant, depth: int, prompts: Mapping[str, str]) -> Row:
    judged, own = judgement(audit, rung.id), dict(free_texts(audit, rung.id))
    against = judged.get("own") or {}
    words = (judged.get("attribution") or {}).get("words") or (
        "not attributed" if against.get("moved") else ""
    )
    same = audit.texts.documents[rung.id].get("same_bits_as")
    cells = tuple(
        rung_cell(own[name], text_below(audit, rung, name), longest_text(audit, name))
        if name in own
        else None
        for name in prompts
    )
    return Row(
        id=rung.id,
        spine=rung.spine,
        depth=depth,
        kl=number(judged.get("kl_nats")),
        change=kl_change(against),
        top1=percent(judged.get("top1")),
        worst=number(judged.get("kl_worst")),
        cells=cells if own else (),
        moved=against.get("moved"),
        why=words or (f"same bits as {same}" if same else ""),
        broken=(judged.get("reasons") or [""])[0] if judged.get("broken") else "",
    )


def _ends(audit: Audit, rungs: list[Variant]) -> dict[str, Any]:
    """How many texts of each kind of prompt ended how: columns (kind, end), a line for the reference and each rung."""
    lines: dict[str, dict[tuple[str, str], int]] = {"reference": {}}
    for name, kind in prompts_of(audit.texts.documents).items():
        _count(lines["reference"], kind, reference_of(audit, name))
    for rung in rungs:
        for _, entry in free_texts(audit, rung.id):
            _count(lines.setdefault(rung.id, {}), entry["kind"], entry["own"])
    order = [*KINDS, *{kind for line in lines.values() for kind, _ in line if kind not in KINDS}]
    columns = sorted(
        {key for line in lines.values() for key in line}, key=lambda key: (order.index(key[0]), key[1])
    )
    told = [
        (name, [line.get(key, 0) for key in columns], line != lines["reference"])
        for name, line in lines.items()
    ]
    return {"columns": [(KINDS.get(kind, kind), end) for kind, end in columns], "lines": told}


def _count(line: dict[tuple[str, str], int], kind: str, text: Text) -> None:
    key = (kind, ended(text))
    line[key] = line.get(key, 0) + 1


def _attributions(audit: Audit, rungs: list[Variant]) -> list[dict[str, Any]]:
    """Rungs whose KL moved: what goes away when an op, or one layer's, computes as the reference does."""
    found = []
    for rung in rungs:
        told = judgement(audit, rung.id).get("attribution")
        if not told:
            continue
        ops, places = (
            [part for part in told.get(name) or [] if not part.get("same_bits")] for name in ("ops", "layers")
        )
        parts = [(part["op"], part["returned"]) for part in ops]
        layers = [(f"{part['op']}, layer {part['layer']}", part["returned"]) for part in places]
        found.append(
            {
                "id": rung.id,
                "words": told["words"],
                "ops": [(name, percent(share), _bar(share)) for name, share in parts[:MOST]],
                "layers": [(name, percent(share), _bar(share)) for name, share in layers[:MOST]],
            }
        )
    return found


def _bar(share: float | None) -> float:
    """Pixels of a share's bar; none for one that is not finite."""
    return round(100 * min(max(share or 0.0, 0.0), 1.0), 1)
