"""A made-up audit: dumps of a two-layer model in which a correct variant rounds to BF16, and KV to its record."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest

from dsv4.config import load
from dsv4.dump import DumpWriter, from_bf16_bits
from dsv4.judge import compare as compare_module
from dsv4.judge import measure as measure_module
from dsv4.judge._texts import Texts
from dsv4.judge.measure import measure, write
from dsv4.plan import flatten
from dsv4.stored import sidecar
from dsv4.taps import BY_NAME, MODEL, TAPS, layer_taps

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "hc_mult": 4,
    "hidden_size": 64,
    "q_lora_rank": 32,
    "num_attention_heads": 2,
    "head_dim": 128,
    "record_bytes": 64 + 128 + 8,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "entries": 12,
    "index_topk": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 50,
}
RATIOS = (0, 4)
POSITIONS = {"prefill": np.arange(20, 40), "decode": np.arange(40, 48)}
ENTRIES = {"prefill": np.arange(3, 40, 4)[-6:], "decode": np.array([43, 47])}
EXACT = {
    "attn_pre",
    "attn_post",
    "attn_comb",
    "moe_pre",
    "moe_post",
    "moe_comb",
    "router_scores",
    "lse",
    "logits",
}
EXACT |= {"expert_weights", "index_scores", "index_k_store"}
EXERCISED = {
    "swiglu_clamp_hits": 9,
    "csa_rows_over_topk": 9,
    "rows_over_window": 9,
    "kv_pages": 3,
    "batch": 2,
    "residual_absmax": [300.0, 280.0],
}


def bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 to BF16, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return from_bf16_bits(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


def encoded(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """E4M3 codes of float32, as bytes, by an encoder that is neither the judge's nor the kernels'."""
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def decoded(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What E4M3 codes stand for."""
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def record(x: np.ndarray) -> np.ndarray:
    """Bytes of KV records with one block: 64 E4M3, 64 BF16, a scale byte and its padding."""
    amax = np.maximum(np.abs(x[:, :64]).max(1, keepdims=True), 1e-4)
    power = np.ceil(np.log2(amax.astype(np.float64) / 448)).astype(int)
    rope = (bf16(x[:, 64:]).view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    scales = np.pad((power + 127).astype(np.uint8), ((0, 0), (0, 7)))
    return np.concatenate((encoded(x[:, :64], np.float32(2.0) ** power), rope, scales), axis=1)


def record_values(stored: np.ndarray) -> np.ndarray:
    """What the bytes of such records stand for."""
    scale = np.exp2(stored[:, 192:193].astype(np.float32) - 127)
    rope = from_bf16_bits(stored[:, 64:192].copy().view("<u2"))
    return np.concatenate((decoded(stored[:, :64].copy(), scale), rope), axis=1)


def places(modes=("isolated", "compounded")):
    """(mode, phase, layer, tap) of a full dump; a reference has every tap in its only mode."""
    for mode in modes:
        for phase in POSITIONS:
            for layer, ratio in enumerate(RATIOS):
                held = "isolated" if modes == ("compounded",) else mode
                yield from ((mode, phase, layer, tap) for tap in layer_taps(ratio, held))
            yield from ((mode, phase, MODEL, tap) for tap in TAPS if tap.where == "model")


@cache
def _shipped():
    config = load(ROOT / "config.yaml")
    return replace(config, checkpoint=ROOT / "data" / "nano", prompts=ROOT / "data" / "prompts.yaml")


class Audit:
    """Folder of a run and what is written to it.

    Dumps without a fault are the same in every test, so they are written once and copied.
    """

    written: ClassVar[dict[str, dict[str, bytes]]] = {}

    def __init__(self, results: Path) -> None:
        self.results = results
        self.config = replace(_shipped())  # a copy: tests change its fields
        self.truth = {}
        for phase in POSITIONS:
            for _, _, layer, tap in places(("isolated",)):
                self.truth[phase, layer, tap.name] = self._truth(phase, layer, tap.name)

    def _truth(self, phase, layer, name):
        tap = BY_NAME[name]
        rng = np.random.default_rng([ord(c) for c in f"{phase}{layer}{name}"])
        rows = len((ENTRIES if tap.axis == "entry" else POSITIONS)[phase])
        shape = (rows, *(SIZES[size] for size in tap.shape.split()))
        if tap.stage in ("kv_store", "comp_store"):
            stored = record(self._truth(phase, layer, tap.stage.removesuffix("_store")))
            return stored if tap.kind == "bytes" else record_values(stored)
        if name == "index_k_store":
            keys = self._truth(phase, layer, "index_k")
            scale = np.abs(keys).max(1, keepdims=True) / np.float32(448)
            return decoded(encoded(keys, scale), scale)
        if name == "expert_ids":
            return np.argsort(rng.random((rows, 8)), axis=1)[:, :2].astype(np.int32)
        values = rng.standard_normal(shape, dtype=np.float32)
        if name == "index_scores":
            visible = (POSITIONS[phase] + 1) // 4
            return np.where(np.arange(12) < visible[:, None], values, np.float32(-np.inf))
        if name == "topk":
            scores = self._truth(phase, layer, "index_scores")
            return np.argsort(-scores, axis=1, kind="stable")[:, :4].astype(np.int32)
        return values * 3 if name == "logits" else values

    def correct(self, mode, phase, layer, tap):
        """What a correct variant stores."""
        values = self.truth[phase, layer, tap.name if tap.reference is None else tap.reference]
        return values if tap.kind in ("bytes", "ids") or tap.name in EXACT else bf16(values)

    def attrs(self, kind, variant="", **more):
        """Attributes of a dump."""
        plan = flatten(self.config.ladder[variant].plan) if variant in self.config.ladder else {}
        shared = {
            "kind": kind,
            "variant": variant or kind,
            "plan": plan,
            "checkpoint": "c" * 8,
            "prompt": "p" * 8,
        }
        shared |= {
            "prompt_id": "one",
            "compress_ratios": list(RATIOS),
            "n_rope": 64,
            "commit": "abc",
            "dirty": False,
        }
        return shared | {"label": "made up", "device": "cpu", "exercised": EXERCISED} | more

    def dump(self, folder, attrs, values, modes=("isolated", "compounded"), draws=None):
        """Write one dump; ``values`` gives a tap's array, or None to leave it out."""
        path = self.results / folder / "one.h5"
        with DumpWriter(path, attrs) as file:
            for mode in modes:
                for phase, positions in POSITIONS.items():
                    file.rows(mode, phase, positions)
            for mode, phase, layer, tap in places(modes):
                array = values(mode, phase, layer, tap)
                if array is None:
                    continue
                kind = {"uint8": "u8", "int32": "i32"}.get(str(array.dtype), "f32")
                entries = ENTRIES[phase] if tap.axis == "entry" else None
                file.put(
                    mode, phase, layer, tap.name, array, kind, entries, attrs=draws(tap) if draws else None
                )
        return path

    def once(self, folder, write):
        """Call ``write`` the first time; copy its file and the hash beside it from then on."""
        target = self.results / folder
        if folder not in self.written:
            write()
            self.written[folder] = {path.name: path.read_bytes() for path in target.iterdir()}
        target.mkdir(parents=True, exist_ok=True)
        for name, content in self.written[folder].items():
            (target / name).write_bytes(content)

    def references(self):
        """Both references; ``plain`` agrees with ``trained``. And the formats of the weights."""
        names = ("self_attn.q_a_proj.weight", "self_attn.q_b_proj.weight", "mlp.experts.gate_up_proj")
        formats = {f"model.layers.{layer}.{name}": "bf16" for layer in range(len(RATIOS)) for name in names}
        self.results.mkdir(parents=True, exist_ok=True)
        (self.results / "checkpoint.json").write_text(json.dumps({"formats": formats}))
        truth = lambda mode, phase, layer, tap: self.truth[phase, layer, tap.name]  # noqa: E731
        self.once(
            "reference", lambda: self.dump("reference", self.attrs("reference"), truth, ("compounded",))
        )
        self.once("plain", lambda: self.dump("plain", self.attrs("plain"), truth))
        return self

    def variant(self, name, change=None, floor=True, **attrs):
        """A variant, correct but for ``change(mode, phase, layer, tap, array) -> array``; and its floor."""
        folder, values = f"variants/{name}", self.correct
        if change or attrs:
            if change:
                values = lambda *at: change(*at, self.correct(*at))  # noqa: E731
            self.dump(folder, self.attrs("variant", name, **attrs), values)
        else:
            self.once(folder, lambda: self.dump(folder, self.attrs("variant", name), values))
        if floor:
            self.once(f"floor/{name}", lambda: self.floor(name))
        return self

    def floor(self, name, change=None):
        """The emulation of a plan, with draws as FP32 noise gives them."""
        values = (lambda *at: change(*at, self.correct(*at))) if change else self.correct
        rng = np.random.default_rng(7)

        def draws(tap):
            loose = tap.name in EXACT
            far = rng.uniform(2e-7, 3e-7, 8) if loose else rng.uniform(1e-5, 3e-5, 8)
            share = np.full(8, 0.9) if loose else rng.integers(0, 2, 8) * 1e-4
            share = np.zeros(8) if tap.kind in ("bytes", "ids") else share
            return {"draw_distance": far, "draw_worst": 3 * far, "draw_changed": share}

        self.dump(f"floor/{name}", self.attrs("floor", name), values, ("isolated",), draws)
        return self

    def measured(self, name):
        """Measure a variant and keep its table where a gate looks for it."""
        frame, notes = measure(self.results, self.config.ladder, name, ["one"])
        write(self.results / "metrics" / f"{name}.parquet", frame, notes)
        return frame, notes


@pytest.fixture(scope="session", autouse=True)
def _compared_once():
    """Compare two dumps once: a test changes one of them, and is measured against several that others wrote too."""
    tables = {}

    def compare(test, reference, **options):
        bytes_of = (sidecar(dump.path).read_text() for dump in (test, reference))  # readers check that hash
        key = (*bytes_of, *options.items())
        if key not in tables:
            tables[key] = compare_module.compare(test, reference, **options)
        return tables[key].copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_module, "compare", compare)
        yield


@pytest.fixture
def audit(tmp_path):
    """An audit with its references."""
    return Audit(tmp_path / "results" / "run").references()


@pytest.fixture(scope="session")
def shipped():
    """The shipped configuration."""
    return _shipped()


@pytest.fixture
def texts(tmp_path, shipped):
    """Text files of a run, the reference's for a start."""
    return Texts(tmp_path / "results" / "run", shipped)
