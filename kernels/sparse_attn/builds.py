"""What is compiled ahead of time of sparse attention: B0, B1a, B1's variants, the combine, the Hopper kernel."""

from kernels.build_spec import Build, Sizes
from kernels.overlap import OVERLAPPED
from kernels.sparse_attn.bf16_kernel import attend_bf16_kernel
from kernels.sparse_attn.combine_kernel import AT_ONCE, MAX_SPLITS, _combine_kernel, sizes_for
from kernels.sparse_attn.fp8_kernel import attend_fp8_kernel
from kernels.sparse_attn.gathered_hopper_kernel import attend_gathered_hopper_kernel
from kernels.sparse_attn.hopper_kernel import attend_hopper_kernel, attend_product_hopper_kernel
from kernels.sparse_attn.hopper_launch_kernel import stages_of
from kernels.sparse_attn.tiles import Family, tile_for

PAGE = 64
ARCHES: dict[Family, tuple[str, ...]] = {
    "hopper": ("sm_90a",),
    "blackwell": ("sm_100a", "sm_103a"),
    "small": ("sm_120a",),
}
SHARED = {
    "idx_ptr": "*i32",
    "sinks_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "page_stride": "i32",
    "table_stride": "i32",
    "heads": "i32",
    "num_keys": "i32",
    "scale": "fp32",
}
PAGES = {"pages_ptr": "*u8", "rope_ptr": "*bf16", "table_ptr": "*i32", "sequence_ptr": "*i32"}
ALIGNED = ("page_stride", "table_stride", "heads", "num_keys")


def builds(sizes: Sizes) -> list[Build]:
    """Every path at a real model's heads and 64-token pages, for each family of devices."""
    return [
        *(build for family in ARCHES for build in _portable(sizes, family)),
        *(_combine(sizes, parts) for parts in (2, 4, 8, AT_ONCE, MAX_SPLITS)),
        _gathered_hopper(sizes),
        *(_hopper(sizes, terms, seven) for terms in (1, 2) for seven in (True, False)),
        *(_hopper_product(sizes, seven) for seven in (True, False)),
    ]


def _portable(sizes: Sizes, family: Family) -> list[Build]:
    tail = f"{sizes.name}/{family}"
    constants = {"NOPE": sizes.head_dim - sizes.qk_rope_head_dim, "PAGE": PAGE}
    none, pdl = dict.fromkeys(("table_ptr", "sequence_ptr")), {"PDL": True}
    bf16 = SHARED | {"q_ptr": "*bf16", "out_ptr": "*bf16", "q_stride": "i32"}
    fp8 = SHARED | {"q_ptr": "*u8", "q_rope_ptr": "*bf16", "q_scale_ptr": "*fp32", "out_ptr": "*bf16"} | PAGES

    def build(name, kernel, signature, extra, native=()):  # noqa: ANN001, ANN202 - local
        tile = tile_for(
            sizes.num_attention_heads,
            sizes.head_dim,
            gathered="keys_ptr" in signature,
            family=family,
            terms=1 + ("residual_ptr" in signature),
        )
        shape = {"BLOCK_H": tile.heads, "BLOCK_S": tile.keys}
        absent = {argument: None for argument in kernel.arg_names if argument.endswith("_ptr")} | none
        absent = {argument: None for argument in absent if argument not in signature or argument in extra}
        given = {name: kind for name, kind in signature.items() if name not in extra}
        return Build(
            name=f"sparse_attn/{name}/{tail}",
            kernel=kernel,
            signature=given,
            constants=absent | constants | shape | extra,
            aligned=tuple(
                name for name, kind in given.items() if kind[0] == "*" or name in (*ALIGNED, "q_stride")
            ),
            options={"num_warps": tile.warps, "num_stages": tile.stages}
            | (OVERLAPPED if "PDL" in extra else {}),
            native=native,
            only=ARCHES[family],
        )

    def narrow(name, **extra):  # noqa: ANN001, ANN003, ANN202 - local
        signature = dict(fp8)
        if "token_scale_ptr" in extra:
            signature["token_scale_ptr"] = extra.pop("token_scale_ptr")
        if "residual_ptr" in extra:
            signature["residual_ptr"] = extra.pop("residual_ptr")
        choices = {"ROPE_FP8": False, "PV_FP8": False} | (none if "table" not in name else {}) | extra
        return build(name, attend_fp8_kernel, signature, choices, ("fp8",))

    return [
        build("b0", attend_bf16_kernel, bf16 | {"keys_ptr": "*bf16"}, none | pdl | {"PAGE": 1}),
        build("b1a", attend_bf16_kernel, bf16 | PAGES, none | pdl),
        build("b1a_table", attend_bf16_kernel, bf16 | PAGES, pdl),
        narrow("b1"),
        narrow("b1_table"),
        narrow("b1_q2", residual_ptr="*u8"),
        narrow("b1_aligned", token_scale_ptr="*fp32"),
        narrow("b1_rope_fp8", ROPE_FP8=True),
        narrow("b1_pv_fp8", PV_FP8=True),
    ]


def _combine(sizes: Sizes, parts: int) -> Build:
    return Build(
        name=f"sparse_attn/combine_{parts}/{sizes.name}",
        kernel=_combine_kernel,
        signature={
            "part_ptr": "*bf16",
            "part_lse_ptr": "*fp32",
            "sinks_ptr": "*fp32",
            "out_ptr": "*bf16",
            "lse_ptr": "*fp32",
            "num_parts": "i32",
            "row_heads": "i32",
            "heads": "i32",
        },
        constants={"K": sizes.head_dim, **sizes_for(parts), "PDL": True},
        aligned=("part_ptr", "part_lse_ptr", "sinks_ptr", "out_ptr", "lse_ptr", "row_heads", "heads"),
        options={"num_warps": 1, **OVERLAPPED},
    )


def _hopper(sizes: Sizes, terms: int, seven: bool) -> Build:
    form = f"{'' if seven else '_aligned'}{'_q2' if terms == 2 else ''}"
    q = {"q_ptr": "*bf16", "residual_ptr": "*bf16", "q_scale_ptr": "*fp32"}
    constants = {"STAGES": stages_of(terms, seven), "TERMS": terms}
    return _on_hopper(f"hopper{form}/{sizes.name}", attend_hopper_kernel, q, {}, constants, seven)


def _hopper_product(sizes: Sizes, seven: bool) -> Build:
    name = f"hopper_product{'' if seven else '_aligned'}/{sizes.name}"
    q, numbers = (
        {"q_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32"},
        {"q_stride": "i32", "eps": "fp32"},
    )
    constants = {"STAGES": stages_of(1, seven)}
    return _on_hopper(name, attend_product_hopper_kernel, q, numbers, constants, seven)


def _on_hopper(name, kernel, q, numbers, constants, seven) -> Build:  # noqa: ANN001 - of the two above
    pointers = {
        **q,
        "data_ptr": "*bf16",
        "scale_ptr": "*i64" if seven else "*fp32",
        "idx_ptr": "*i32",
        "sinks_ptr": "*fp32",
        "out_ptr": "*bf16",
        "lse_ptr": "*fp32",
    }
    sizes = {**dict.fromkeys(("page_units", "heads", "num_keys"), "i32"), "score_scale": "fp32"}
    return Build(
        name=f"sparse_attn/{name}",
        kernel=kernel,
        signature={**pointers, **numbers, **sizes},
        constants={**constants, "PAGE": PAGE if seven else 1, "SEVEN": seven, "PDL": True},
        aligned=(*pointers, *(name for name in numbers if name == "q_stride")),
        options={"num_warps": 4, **OVERLAPPED},
        native=("fp8",),
        only=("sm_90a",),
    )


def _gathered_hopper(sizes: Sizes) -> Build:
    pointers = {"q_ptr": "*bf16", "keys_ptr": "*bf16", "idx_ptr": "*i32", "sinks_ptr": "*fp32"}
    pointers |= {"out_ptr": "*bf16", "lse_ptr": "*fp32"}
    numbers = {"q_stride": "i32", "heads": "i32", "num_keys": "i32"}
    return Build(
        name=f"sparse_attn/hopper_b0/{sizes.name}",
        kernel=attend_gathered_hopper_kernel,
        signature={**pointers, **numbers, "factor": "fp32"},
        constants={"STAGES": 2, "PDL": True},
        aligned=(*pointers, *numbers),
        options={"num_warps": 4, **OVERLAPPED},
        only=("sm_90a",),
    )
