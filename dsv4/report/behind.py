"""What stands behind the verdicts, and who ran what: the page's last tables, as text."""

from collections.abc import Mapping
from typing import Any

from dsv4.report.digits import NONE, first
from dsv4.report.load import Audit
from dsv4.report.tables import ordered


def details(audit: Audit) -> list[dict[str, Any]]:
    """What stands behind each verdict: taps, fidelity, blast radius, what was not exercised."""
    rows = []
    for rung, _ in ordered(audit.ladder):
        verdict = audit.verdicts.get(rung.id)
        if verdict is None:
            continue
        blast = verdict.get("blast_radius") or {}
        taps = verdict.get("taps")
        rows.append(
            {
                "id": rung.id,
                "commit": _short(verdict.get("commit")),
                "taps": _taps(verdict.get("taps_by_mode") or ({"": taps} if taps else {})),
                "partial": bool(taps and taps[0] < taps[1]),
                "fidelity": _fidelity(verdict),
                "blast": _blast(blast),
                "blast_ok": blast.get("ok"),
                "reasons": first(verdict.get("reasons") or []) or NONE,
                "not_exercised": "; ".join(verdict.get("not_exercised") or []) or NONE,
                "confirmed": _confirmed(verdict.get("confirmed")),
            }
        )
    return rows


def guards(audit: Audit) -> list[dict[str, str]]:
    """What was found of each tree that was judged: stored formats, batched prefill; rungs of which it is the same."""
    found: dict[tuple[str, ...], list[str]] = {}
    for rung, _ in ordered(audit.ladder):
        guard = (audit.verdicts.get(rung.id) or {}).get("guard")
        if guard:
            stored = (_plain(guard.get(part) or {}) or "none found" for part in ("moe", "linears"))
            found.setdefault((*stored, _batched(guard.get("batched_prefill"))), []).append(rung.id)
    names = ("moe", "linears", "batched")
    return [
        {"rungs": ", ".join(rungs)} | dict(zip(names, said, strict=True)) for said, rungs in found.items()
    ]


def _batched(found: Mapping[str, Any] | None) -> str:
    """``absent``, or the entry point and how a batch compares with single prompts."""
    if not found:
        return "absent"
    if "compared" in found:
        return f"{found['entry_point']}, against single prompts: {found['compared']}"
    same = "the same bits" if found["bit_equal"] else f"relative L2 {found['rel_l2']:.2g}"
    return f"{found['entry_point']}, {' and '.join(found['prompts'])} at once against each alone: {same}"


def _taps(counts: Mapping[str, list[int]]) -> str:
    """``254 of 254 isolated, 122 of 254 compounded``."""
    return (
        ", ".join(f"{dumped} of {there} {mode}".strip() for mode, (dumped, there) in counts.items()) or NONE
    )


def _blast(blast: Mapping[str, Any]) -> str:
    if blast.get("ok") is None:
        return NONE
    changed = first([str(item) for item in blast.get("changed") or []])
    return "only claimed ops changed" if blast["ok"] else f"unclaimed ops changed: {changed or 'not named'}"


def _confirmed(found: Mapping[str, Any] | None) -> str:
    if not found:
        return NONE
    flags = {name: value for name, value in found.items() if isinstance(value, bool) and name != "confirmed"}
    said = ", ".join(f"{name} {_yes(value)}" for name, value in flags.items())
    if "confirmed" not in found:
        return said or NONE
    return f"{'confirmed' if found['confirmed'] else 'not confirmed'}{f' ({said})' if said else ''}"


def _short(commit: str | None) -> str:
    """The commit's first digits; what else is said of it (that there were changes) stays."""
    name, _, more = (commit or NONE).partition(" ")
    return f"{name[:10]} {more}".strip()


def _fidelity(verdict: Mapping[str, Any]) -> str:
    counts = verdict.get("fidelity_counts") or {}
    said = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count)
    word = (verdict.get("fidelity") or NONE).replace("_", " ")
    return f"{word} ({said})" if said else word


def _yes(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def labels(audit: Audit) -> list[str]:
    """What every number of the page is to be read under: emulated, weights, devices."""
    said = [*(audit.head.get("labels") or []), *(verdict.get("label") for verdict in audit.verdicts.values())]
    return list(dict.fromkeys(label for label in said if label))


def identity(audit: Audit) -> list[tuple[str, str]]:
    """Who ran what on what: everything that the artefacts say of the run, each once."""
    head = {key: value for key, value in audit.head.items() if key not in ("schema", "labels", "target")}
    for name in ("run", "identity"):
        head |= head.pop(name, None) or {}
    checkpoint, command = head.pop("checkpoint_sha256", None), head.pop("command", None)
    command = command or f"snakemake {audit.target or 'all'}"
    config = audit.checkpoint.get("config") or {}
    told = {
        **{key: value for key, value in audit.labels.items() if key not in ("label", "checkpoint")},
        **{key: value for key, value in head.items() if value is not None},
        "checkpoint folder": audit.checkpoint.get("folder"),
        "checkpoint": audit.checkpoint.get("sha256") or audit.labels.get("checkpoint") or checkpoint,
        "tensors stored as": audit.checkpoint.get("stored_as"),
        "sizes": {name: value for name, value in config.items() if not isinstance(value, float)},
        "labels": labels(audit),
        "to repeat": command,
    }
    return [
        (name.replace("_", " "), _plain(value))
        for name, value in told.items()
        if value not in (None, "", {}, [])
    ]


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    if isinstance(value, list):
        return (
            " ".join(map(str, value))
            if all(isinstance(item, int) for item in value)
            else ", ".join(map(_plain, value))
        )
    return _yes(value)
