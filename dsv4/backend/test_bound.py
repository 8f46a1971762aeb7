"""How far kernels' sums may put a tap from the refs': FP32 sums, and FP8 products as the noise floor draws them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4 import config as configuration
from dsv4.backend.conftest import ROOT, InMemory
from dsv4.backend.values import on_cpu
from dsv4.floor.accumulation import FP32, Accumulation, accumulation_of
from dsv4.floor.model import FloorModel
from dsv4.floor.storage import quantiser
from dsv4.model import numerics
from dsv4.model.config import ModelConfig
from dsv4.model.stages import embed
from dsv4.model.transformer import Layer, Transformer
from dsv4.model.weights import ModelWeights
from dsv4.plan import Plan
from dsv4.run.isolated import Model, Reference, run_isolated
from dsv4.taps import BY_NAME
from kernels.rounding import exact

Taps = dict[tuple[Layer, str], Tensor]
Known = InMemory | Reference
HOPPER_SUMS = accumulation_of("kernel", (9, 0))
LADDER = configuration.load(ROOT / "config.yaml").ladder
DRAWS = 8
FP32_SUM = 2.0**-17  # of a row's largest: up to 256 products, 2^-24 each, and Sinkhorn's
BF16_STEP = 2.0**-7
# A row's root mean square beside the draws': four standard deviations, and what a draw and a simulated sum differ by
# in dsv4/floor/test_accumulation.py.
OF_DRAWS = 4 * 1.5
# One code of a row's 128 inputs or more on its other side: the largest step of E4M3 and of E2M1 over the value, of an
# input that is four times the others' root mean square.
ONE_CODE = {"fp8": 2.0**-3 * 4 / 128**0.5, "nvfp4": 2.0**-1 * 4 / 128**0.5}
# What a stage stores of the reference's own value has no sum before it: the same bits.
STORED = {
    "attn_in_q",
    "qr_q",
    "moe_in_q",
    "kv_store",
    "kv_bytes",
    "comp_store",
    "comp_bytes",
    "index_k_store",
}
UNROUNDED = {"attn_pre", "attn_post", "attn_comb", "moe_pre", "moe_post", "moe_comb", "comp", "index_k"}
UNROUNDED |= {"router_scores", "expert_weights", "logits", "lse", "index_scores"}
IDS = {"topk", "expert_ids"}
CODED = {"attn_proj", "routed", "shared"}  # NVFP4 codes on the way, made from sums
# Of a row's some 250 values on the way one in a hundred lands on the other side of a BF16 boundary, one such step in
# fifty crosses a code's, and one in a hundred of these rows a block scale's: a twentieth of all rows, thrice that here.
RECODED = 0.15


def isolated(
    config: ModelConfig,
    weights: ModelWeights,
    reference: Known,
    model: Model,
    stages: frozenset[str] | None = None,
) -> Taps:
    """Taps that isolated mode shows: (layer, name) -> value."""
    found: Taps = {}

    def probe(positions: Tensor) -> Callable[[Layer, str, object], object]:
        def keep(layer: Layer, name: str, value: object) -> object:
            if not name.endswith("_closed"):
                found[layer, name] = on_cpu(value).clone()
            return value

        return keep

    rows = torch.from_numpy(reference.rows.all)
    streams = embed(weights, config, reference.tokens[rows], exact)
    run_isolated(model, reference, streams, probe, stages)  # type: ignore[arg-type]
    return found


# Tap -> matrices that it is a product with.
PRODUCTS = {"qr": ("q_a",), "q": ("q_b",), "kv": ("kv",), "attn_proj": ("o_a", "o_b")}
PRODUCTS |= {"routed": ("experts_gate_up", "experts_down"), "shared": ("shared_gate", "shared_down")}


def fp8_sums(plan: Plan, weights: ModelWeights | None = None) -> frozenset[str]:
    """Taps behind which products of FP8 values are added: by the plan, and by how ``weights`` are stored."""
    attention = () if plan.q_format == "bf16" else ("attn_out", "lse")
    stored = {
        name
        for layer in (weights.layers if weights else ())
        for name, matrices in PRODUCTS.items()
        if any(getattr(layer, matrix).format == "fp8" for matrix in matrices)
    }
    return frozenset((*attention, *(("index_scores",) if plan.index_score == "fp8" else ()), *stored))


def requantised(weights: ModelWeights) -> dict[str, str]:
    """Tap whose second matrix reads what is quantised inside -> how that is stored, the coarsest of its layers."""
    second = {name: matrices[1] for name, matrices in PRODUCTS.items() if len(matrices) == 2}
    ways = {
        name: ONE_CODE.keys() & {quantiser(getattr(layer, matrix).format) for layer in weights.layers}
        for name, matrix in second.items()
    }
    return {name: max(found, key=lambda way: ONE_CODE[way]) for name, found in ways.items() if found}


def normed_stores(plan: Plan) -> frozenset[str]:
    """Taps in FP32 that are norms of rows stored in BF16."""
    found = {"attn_in", "moe_in"} if plan.mhc_quant == "unfused" and plan.norm_quant != "unfused" else set()
    found |= {"qr"} if plan.q_a_norm == "fused" else set()
    found |= {"hidden"} if plan.casts.head != "bf16" else set()
    return frozenset(found | ({"kv"} if plan.kv_norm == "fused" else set()))


def drawn(
    config: ModelConfig,
    weights: ModelWeights,
    reference: Known,
    plan: Plan,
    sums: Accumulation,
    seeds: range = range(DRAWS),
) -> dict[tuple[Layer, str], list[Tensor]]:
    """Draws of the taps of :func:`fp8_sums`, as the noise floor draws them; none where sums are FP32."""
    names = fp8_sums(plan, weights) if sums != FP32 else frozenset[str]()
    stages = frozenset(BY_NAME[name].stage for name in names)
    found: dict[tuple[Layer, str], list[Tensor]] = {}
    for seed in seeds if names else ():
        taps = isolated(config, weights, reference, FloorModel(config, weights, plan, seed, sums), stages)
        for key in taps:
            if key[1] in names:
                found.setdefault(key, []).append(taps[key])
    return found


def _off(one: Tensor, other: Tensor) -> Tensor:
    """Distances (T, the rest); 0 where both are not finite."""
    assert torch.equal(one.isfinite(), other.isfinite())
    return torch.where(other.isfinite(), (one - other).double(), 0.0).flatten(1)


def assert_drawn(
    name: str, ours: Tensor, wanted: Tensor, draws: list[Tensor], inside: str | None = None
) -> None:
    """Every row is as near the refs as the draws are: its root mean square.

    Behind a second quantiser (``inside``, see :func:`requantised`) one row of several may have a code on its other
    side where no draw has: :data:`ONE_CODE`.
    """
    assert ours.shape == wanted.shape, name
    spread = torch.stack([_off(draw, wanted).square().mean(1) for draw in draws]).mean(0).sqrt()
    fp32 = FP32_SUM * torch.where(wanted.isfinite(), wanted.abs(), 0.0).flatten(1).amax(1)
    far = _off(ours, wanted).square().mean(1).sqrt()
    beyond = far > OF_DRAWS * spread + fp32
    if inside and int(beyond.sum()) == 1 < len(beyond):
        size = torch.where(wanted.isfinite(), wanted, 0.0).double().flatten(1).square().mean(1).sqrt()
        beyond = far > ONE_CODE[inside] * size
    assert not beyond.any(), (name, float((far / (spread + fp32)).max()))


def assert_close(
    name: str, ours: Tensor, wanted: Tensor, *, normed: bool = False, handful: float = 0.01
) -> None:
    """How far FP32 sums in another order may put a tap.

    FP32 results: :data:`FP32_SUM`. BF16 stores: a value next to a rounding boundary lands on its other side, one step
    away, two where two stores follow each other; a ``handful`` of elements. The norm of a stored row (``normed``)
    divides all of it by the root of its mean square, which a step of one value moves by up to that value's part of
    the sum of squares: the row has a factor, two such steps at most, and all else is judged without it. An NVFP4 code
    on the way flips likewise and moves a whole row by a part of its size: of few rows (:data:`RECODED`), and by no more
    than a flipped scale of its largest block would.
    """
    assert ours.shape == wanted.shape, name
    if name in STORED or BY_NAME[name].kind == "bytes":
        assert torch.equal(ours, wanted), name
        return
    if name in IDS:
        assert float((ours.long() != wanted.long()).any(-1).float().mean()) <= 0.01, name
        return
    finite = wanted.isfinite()
    assert torch.equal(ours.isfinite(), finite), name
    size = torch.where(finite, wanted.abs(), 0.0)
    largest = size.flatten(1).amax(1).view(-1, *[1] * (wanted.ndim - 1))
    if normed and wanted.numel():
        ratio = torch.where(size >= largest / 16, ours.double() / wanted.double(), torch.nan)
        factor = ratio.nanmedian(-1, keepdim=True).values.nan_to_num(1.0)
        share = (largest.double() ** 2 / size.double().square().sum(-1, keepdim=True)).nan_to_num(0.0)
        assert bool(((factor - 1).abs() <= 2 * BF16_STEP * share + FP32_SUM).all()), name
        ours = (ours.double() / factor).float()
    off = torch.where(finite, (ours - wanted).abs(), 0.0)
    if name in UNROUNDED:
        assert bool((off <= FP32_SUM * largest).all()), (name, float((off / largest).max()))
    elif name in CODED:
        assert float(off.norm()) <= 0.05 * float(size.norm()), name
        far = off.flatten(1).norm(dim=1) / size.flatten(1).norm(dim=1).clamp_min(1e-30)
        assert int((far > BF16_STEP).sum()) <= max(1.0, RECODED * len(far)), (name, far.tolist())
        assert bool((far <= 0.25).all()), (name, float(far.max()))
    else:
        assert float((off > FP32_SUM * largest).float().mean()) <= handful, name
        # RoPE may leave a small value of two large ones
        assert bool((off <= 2 * BF16_STEP * largest).all()), name


def passes(check: Callable[..., None], *values: object, **named: object) -> bool:
    """Whether ``check`` holds."""
    try:
        check(*values, **named)
    except AssertionError:
        return False
    return True


@pytest.fixture(scope="module")
def fp8(small: tuple[ModelConfig, ModelWeights, InMemory]) -> tuple[Taps, Taps, dict[object, list[Tensor]]]:
    """Of B2, FP8 everywhere: the refs' taps, those of one more draw, and the draws."""
    config, weights, reference = small
    plan = LADDER["B2"].plan
    names = fp8_sums(plan)
    assert names == {"attn_out", "lse", "index_scores"}
    refs = Transformer(config, weights, numerics.of_plan(plan, config), page_size=4)
    taps = isolated(config, weights, reference, refs)
    draws = drawn(config, weights, reference, plan, HOPPER_SUMS)
    other = drawn(config, weights, reference, plan, HOPPER_SUMS, range(DRAWS, DRAWS + 1))
    return taps, {key: one for key, (one,) in other.items()}, draws  # type: ignore[return-value]


def test_one_more_draw_is_inside_the_draws_bound_and_fp32_sums_are(fp8):
    refs, other, draws = fp8
    assert {name for _, name in draws} == {"attn_out", "lse", "index_scores"}
    for (layer, name), found in draws.items():
        assert_drawn(name, other[layer, name], refs[layer, name], found)
        assert_drawn(name, refs[layer, name], refs[layer, name], found)


def test_faults_leave_the_draws_bound(fp8):
    refs, _, draws = fp8
    for (layer, name), found in draws.items():
        value = refs[layer, name]
        last = value.clone()
        last[-1] = last[-1] * 1.02
        for wrong in (value * 1.02, last, value.roll(1, 0)):
            assert not passes(assert_drawn, name, wrong, value, found), (layer, name)


@pytest.mark.parametrize("inside", ONE_CODE)
def test_one_row_behind_a_second_quantiser_may_be_a_code_off_and_no_more(inside):
    value = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    draws = [value + 1e-5 * value.roll(k, 1) for k in range(1, 5)]
    one, two, far = value.clone(), value.clone(), value.clone()
    one[1] *= 1 + ONE_CODE[inside] / 2
    two[1:3] *= 1 + ONE_CODE[inside] / 2
    far[1] *= 1 + 2 * ONE_CODE[inside]
    assert_drawn("shared", one, value, draws, inside)
    assert not passes(assert_drawn, "qr", one, value, draws)
    assert not any(passes(assert_drawn, "shared", wrong, value, draws, inside) for wrong in (two, far))
    assert not passes(assert_drawn, "shared", one[1:2], value[1:2], [draw[1:2] for draw in draws], inside)


def test_only_hopper_and_fp8_products_are_drawn(small):
    assert not drawn(*small, LADDER["B2"].plan, FP32)
    assert not drawn(*small, LADDER["B1a"].plan, HOPPER_SUMS)


def test_a_normed_row_may_have_the_factor_of_one_bf16_step_and_no_more():
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    stepped = x.clone()
    row, column = divmod(int(x.abs().argmax()), x.shape[1])
    stepped[row, column] *= 1 + 2.0**-7
    want, ours = (y / y.square().mean(-1, keepdim=True).sqrt() for y in (x, stepped))
    assert not passes(assert_close, "moe_in", ours, want)
    assert_close("moe_in", ours, want, normed=True)
    scaled, one, sign = want.clone(), want.clone(), want.clone()
    scaled[3] *= 1.002
    one[3, ::16] *= 1.05
    sign[3] *= -1
    for wrong in (scaled, one, sign, want.roll(1, 0)):
        assert not passes(assert_close, "moe_in", wrong, want, normed=True)


@pytest.mark.parametrize("name", sorted(CODED))
def test_gains_leave_the_bound_of_what_codes_made(name):
    want = torch.randn(40, 256, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    stepped, recoded = want.clone(), want.clone()
    stepped[:, ::100] *= 1 + BF16_STEP
    recoded[::10, :16] *= 1.125
    for right in (stepped, recoded):
        assert_close(name, right, want)
    few, one = want.clone(), want.clone()
    few[:8] *= 1.1
    one[7] *= 1.3
    for wrong in (want * 1.04, want * 1.01, few, one, want.roll(1, 0)):
        assert not passes(assert_close, name, wrong, want)
