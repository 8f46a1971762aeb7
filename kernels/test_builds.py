"""What is compiled ahead of time is what is launched: constants and types of launches at the real models' shapes.

Launches are recorded, not run, on tensors without memory.
"""

import functools
import importlib
import inspect

import pytest
import torch

from kernels._check import not_launched
from kernels.build import collect
from kernels.build.architecture import ARCHITECTURES
from kernels.build_spec import FLASH, PRO, Build
from kernels.formats.kv_record import RecordLayout
from kernels.formats.nvfp4_record import Nvfp4Layout
from kernels.fp8_quantise.ref import Fp8Rows
from kernels.gather_dequantise import kernel as gather
from kernels.grouped_ffn import fp8_kernel as fp8_experts
from kernels.grouped_ffn import kernel as grouped_ffn
from kernels.grouped_ffn.fp8_kernel import fp8_grouped_ffn
from kernels.index_logits import hopper_kernel as hopper_logits
from kernels.index_logits import kernel as index_logits
from kernels.kv_store import kernel as kv_store
from kernels.linear import fp8_kernel as fp8
from kernels.linear import kernel as linear
from kernels.linear.fp8_product_kernel import Fp8Weight, Mxfp4Weight
from kernels.sparse_attn import combine_kernel, gathered_hopper_kernel, product, tiles
from kernels.sparse_attn import hopper_launch_kernel as hopper_launch
from kernels.sparse_attn import kernel as sparse_attn
from kernels.sparse_attn.builds import ARCHES

BF16, F32, I32, U8, E4M3 = torch.bfloat16, torch.float32, torch.int32, torch.uint8, torch.float8_e4m3fn
TYPES = {BF16: "*bf16", F32: "*fp32", I32: "*i32", torch.int64: "*i64", U8: "*u8", E4M3: "*fp8e4nv"}
PAGE = 64
of = functools.partial(torch.empty, device="meta")


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """Launches overlap, as they do from compute capability 9 on."""
    for module in (gather, sparse_attn, index_logits, combine_kernel, hopper_launch, gathered_hopper_kernel):
        monkeypatch.setattr(module, "overlap", lambda _: {"PDL": True, "launch_pdl": True})


def fits(build: Build, kernel, given: dict, arch: str) -> bool:
    """Whether a launch is of this build: kernel, architecture, constants, and types where the build names one."""
    if build.kernel is not kernel or (build.only and arch not in build.only):
        return False
    constants = {name: given[name] for name in build.constants}
    kinds = {
        name: kind_of(given[name])
        for name, kind in build.signature.items()
        if kind[0] == "*" or kind[0] == "i"
    }
    return constants == dict(build.constants) and all(
        kind is None or build.signature[name] == kind for name, kind in kinds.items()
    )


def kind_of(value) -> str | None:
    """Triton's type of an argument; None for what has none to compare, such as a descriptor."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "constant" if value is None else None


def assert_built(launched, builds: list[Build], arch: str) -> None:
    assert launched
    for kernel, given in launched:
        name = kernel.fn.__name__
        same = [build for build in builds if build.kernel is kernel]
        assert any(fits(build, kernel, given, arch) for build in same), (
            f"{name} on {arch}: {described(given)}"
        )


def described(given: dict) -> dict:
    return {
        name: kind_of(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()
    }


def attend(sizes, path: str, splits: int | None, rows: int = 4, num_keys: int = 640) -> None:
    """A path of sparse attention at a model's heads, as the model calls it."""
    heads, width = sizes.num_attention_heads, sizes.head_dim
    into = sparse_attn.room(rows, heads, num_keys, width, torch.device("meta"), splits=splits)
    idx, sinks = of(rows, num_keys, dtype=I32), of(heads, dtype=F32)
    table = (
        {"page_table": of(rows, 16, dtype=I32), "sequence": of(rows, dtype=I32)} if "table" in path else {}
    )
    options = {"scale": 1.0, "into": into, **table}
    pages = of(9, RecordLayout(width - 64).page_bytes(PAGE), dtype=U8)
    q = of(rows, heads, width, dtype=BF16)
    if path == "b0":
        sparse_attn.sparse_attn_gathered(q, of(rows, num_keys, width, dtype=BF16), idx, sinks, **options)
    elif path.startswith("b1a"):
        sparse_attn.sparse_attn_widened(q, pages, idx, sinks, **options)
    else:
        if "aligned" in path:
            pages, options["token_scale"] = of(9, PAGE, width + 64, dtype=U8), of(9, PAGE, dtype=F32)
        if "q2" in path:
            options["residual"] = of(rows, heads, width - 64, dtype=U8)
        if "product" in path:
            turn = of(rows, 32, dtype=F32), of(rows, 32, dtype=F32)
            product.sparse_attn_product(q, *turn, pages, idx, sinks, eps=1e-6, launches=1, **options)
            return
        options |= {"rope_fp8": "rope_fp8" in path, "pv_fp8": "pv_fp8" in path}
        sparse_attn.sparse_attn_fp8(
            of(rows, heads, width + 64, dtype=U8), of(rows, heads, dtype=F32), pages, idx, sinks, **options
        )


@pytest.mark.parametrize("sizes", [FLASH, PRO], ids=lambda sizes: sizes.name)
@pytest.mark.parametrize("arch", [arch for arches in ARCHES.values() for arch in arches])
@pytest.mark.parametrize(
    "path",
    ["b0", "b1a", "b1a_table", "b1", "b1_table", "b1_q2", "b1_aligned", "b1_rope_fp8", "b1_pv_fp8"],
)
def test_portable_attention_is_built_at_every_number_of_splits(sizes, arch, path, monkeypatch):
    family = next(family for family, arches in ARCHES.items() if arch in arches)

    def tile_of(heads, width, _, *, gathered, terms=1):
        return tiles.tile_for(heads, width, gathered=gathered, family=family, terms=terms)

    monkeypatch.setattr(sparse_attn, "tile_of", tile_of)
    builds = sparse_attn.builds(sizes)
    for splits in (1, 2, 3, 5, 10, 17, 33, combine_kernel.MAX_SPLITS):
        with not_launched() as launched:
            attend(sizes, path, splits)
        assert len(launched) == 1 + (splits > 1)
        assert_built(launched, builds, arch)


@pytest.mark.parametrize("sizes", [FLASH, PRO], ids=lambda sizes: sizes.name)
@pytest.mark.parametrize(
    "path", ["b0", "b1", "b1_q2", "b1_aligned", "b1_aligned_q2", "product", "product_aligned"]
)
def test_hopper_attention_is_built_whole_and_in_parts(sizes, path, monkeypatch):
    monkeypatch.setattr(hopper_launch, "why_not", lambda _: None)
    builds = sparse_attn.builds(sizes)
    for splits in (1, 2, 10):
        with not_launched() as launched:
            attend(sizes, path, splits)
        assert "hopper" in launched[0][0].fn.__name__
        assert_built(launched, builds, "sm_90a")


def test_the_launches_splits_are_among_those():
    """What a launch chooses by itself: 1 to MAX_SPLITS."""
    found = {
        combine_kernel.num_splits(rows, heads // tiles.BLOCK, keys, tiles.BLOCK)
        for rows in range(1, 140)
        for heads in (64, 128)
        for keys in (64, 128, 192, 640, 1152, 8320)
    }
    assert {1, 2, combine_kernel.MAX_SPLITS} <= found <= set(range(1, combine_kernel.MAX_SPLITS + 1))


@pytest.mark.parametrize("sizes", [FLASH, PRO], ids=lambda sizes: sizes.name)
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("form", ["prefill", "fp8", "fp4", "folded", "hopper"])
def test_scores_are_built_with_hidden_entries_filled_and_left(sizes, arch, fill, form, monkeypatch):
    heads, rows = sizes.index_n_heads, 6
    narrow = form == "fp4"
    if (form == "hopper" and arch != "sm_90a") or (narrow and arch == "sm_90a"):
        return  # never launched there
    if form == "hopper":
        monkeypatch.setattr(hopper_logits, "why_not", lambda *_: None)
    weights, limits = of(rows, heads, dtype=F32), of(rows, dtype=I32)
    with not_launched() as launched:
        if form in ("prefill", "hopper"):
            index_logits.index_logits(
                of(rows, heads, 128, dtype=E4M3),
                of(4096, 128, dtype=E4M3),
                of(4096, dtype=F32),
                weights,
                limits,
                fill=fill,
            )
        else:
            q = of(rows, 1, heads, 64, dtype=U8) if narrow else of(rows, 1, heads, 128, dtype=E4M3)
            pages = of(9, PAGE * (132 if form == "fp8" else 68), dtype=U8)
            op = index_logits.paged_index_logits if form == "fp8" else index_logits.paged_index_logits_fp4
            scales = {"q_scales": of(rows, 1, heads, 4, dtype=U8)} if narrow else {}
            table = of(rows, 512, dtype=I32)
            op(q, pages, table, weights[:, None], limits[:, None], page_size=PAGE, fill=fill, **scales)
    assert_built(launched, index_logits.builds(sizes), arch)


@pytest.mark.parametrize("sizes", [FLASH, PRO], ids=lambda sizes: sizes.name)
@pytest.mark.parametrize("kv_format", ["fp8", "nvfp4"])
def test_the_gather_is_built(sizes, kv_format):
    nope, layout = sizes.head_dim - 64, gather.LAYOUTS[kv_format]
    with not_launched() as launched:
        pages = of(9, layout(nope).page_bytes(PAGE), dtype=U8)
        gather.gather_dequantise(pages, of(4, 640, dtype=I32), nope=nope, kv_format=kv_format)
    for arch in ARCHITECTURES:
        assert_built(launched, gather.builds(sizes), arch)


@pytest.mark.parametrize("sizes", [FLASH, PRO], ids=lambda sizes: sizes.name)
@pytest.mark.parametrize("four_bit", [False, True], ids=["fp8", "mxfp4"])
def test_products_on_fp8_rows_are_built(sizes, four_bit):
    def weight(*shape):
        *stack, n, k = shape
        if four_bit:
            return Mxfp4Weight(of(*shape[:-1], k // 2, dtype=U8), of(*shape[:-1], k // 32, dtype=U8))
        return Fp8Weight(of(*shape, dtype=E4M3), of(*stack, -(-n // 128), k // 128, dtype=F32))

    def rows(count, k):
        return Fp8Rows(of(count, k, dtype=E4M3), of(count, k // 128, dtype=F32))

    heads, d, f = sizes.num_attention_heads * sizes.head_dim, sizes.hidden_size, sizes.moe_intermediate_size
    with not_launched() as launched:
        fp8.fp8_linear(rows(16, sizes.q_lora_rank), weight(heads, sizes.q_lora_rank))
        fp8.fp8_linear(rows(64, d), weight(sizes.head_dim, d))
        chosen = of(64, 6, dtype=I32), of(64, 6, dtype=F32)
        experts = weight(sizes.n_routed_experts, 2 * f, d), weight(sizes.n_routed_experts, d, f)
        fp8_grouped_ffn(rows(64, d), *chosen, *experts, limit=1.0)
    ours = [one for one in launched if one[0] in (fp8._fp8_linear, fp8_experts._grouped_fp8_product)]
    assert len(ours) == 4
    builds = linear.builds(sizes) + grouped_ffn.builds(sizes)
    for arch in ARCHITECTURES:
        assert_built(ours, builds, arch)


@pytest.mark.parametrize("sizes", [FLASH, PRO], ids=lambda sizes: sizes.name)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["window", "entries"])
def test_the_write_of_nvfp4_records_is_built(sizes, dtype):
    pages = of(9, Nvfp4Layout(sizes.head_dim - 64).page_bytes(PAGE), dtype=U8)
    with not_launched() as launched:
        kv_store.store_nvfp4(of(4, sizes.head_dim, dtype=dtype), pages, of(4, dtype=torch.int64))
    for arch in ARCHITECTURES:
        assert_built(launched, kv_store.builds(sizes), arch)


def test_a_launch_that_no_build_covers_is_seen():
    builds = [build for build in sparse_attn.builds(FLASH) if not build.name.startswith("sparse_attn/b1a/")]
    with not_launched() as launched:
        attend(FLASH, "b1a", 2)
    with pytest.raises(AssertionError, match="attend_bf16_kernel on sm_90a"):
        assert_built(launched, builds, "sm_90a")


def text_of(kernel, seen: set) -> str:
    """Source of a kernel and of the device functions that it names."""
    if id(kernel) in seen:
        return ""
    seen.add(id(kernel))
    function = kernel.fn
    text = inspect.getsource(function)
    called = [function.__globals__.get(name) for name in function.__code__.co_names]
    return text + "".join(text_of(one, seen) for one in called if hasattr(one, "fn"))


def test_a_kernel_with_block_scaled_products_says_which_must_be_native():
    """The compiler may take such a product apart, silently: only the instruction tells."""
    scaled = 0
    for sizes in (FLASH, PRO):
        for name in collect.modules():
            for build in importlib.import_module(name).builds(sizes):
                if build.constants.get("WAY", "native") == "native" and "dot_scaled" in text_of(
                    build.kernel, set()
                ):
                    scaled += 1
                    assert {"mxfp4", "nvfp4"} & set(build.native), build.name
    assert scaled
