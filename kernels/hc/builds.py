"""What is compiled ahead of time of mHC: both kernels of the mix by path and number of rows, and the streams' two."""

from collections.abc import Mapping
from typing import Any

from kernels.build_spec import Build, Sizes
from kernels.formats.device import EXACT
from kernels.hc import hopper_kernel as hopper
from kernels.hc.columns_hopper_kernel import partial_columns_kernel
from kernels.hc.finish_kernel import finish_kernel
from kernels.hc.mix_kernel import partial_kernel
from kernels.hc.streams_kernel import collapse_kernel, expand_kernel
from kernels.hc.weights_kernel import STREAMS, Tiles, hopper_tiles, tiles
from kernels.overlap import OVERLAPPED


def builds(sizes: Sizes) -> list[Build]:
    """The mix of few and of many rows, of both paths, the streams' sum and their update."""
    K, found = STREAMS * sizes.hidden_size, []
    for phase, T in (("decode", 1), ("batch", 512), ("prefill", 4096)):
        for path, chosen in (("portable", tiles(T, K)), ("hopper", hopper_tiles(T, K))):
            only = ("sm_90a",) if path == "hopper" else ()
            found += [
                _partial(f"hc/mix_partial_{path}_{phase}/{sizes.name}", chosen, only),
                _finish(f"hc/mix_finish_{path}_{phase}/{sizes.name}", chosen, sizes.hc_sinkhorn_iters, only),
            ]
    pointers = {"streams_ptr": "*bf16", "pre_ptr": "*fp32", "x_ptr": "*bf16"}
    integers = ("streams_stride", "num_rows", "D")
    constants = {"ROWS": 1, "BLOCK_D": 2048}
    found.append(
        _build(
            f"hc/collapse/{sizes.name}",
            collapse_kernel,
            pointers,
            integers,
            constants | {"num_warps": 8, **EXACT},
            integers[::2],
        )
    )
    pointers = {
        "streams_ptr": "*bf16",
        "y_ptr": "*bf16",
        "post_ptr": "*fp32",
        "comb_ptr": "*fp32",
        "new_ptr": "*bf16",
    }
    integers = ("streams_stride", "y_stride", "D")
    found.append(
        _build(
            f"hc/expand/{sizes.name}",
            expand_kernel,
            pointers,
            integers,
            {"BLOCK_D": 1024, "num_warps": 4, **EXACT},
            integers,
        )
    )
    return found


def _partial(name: str, chosen: Tiles, only: tuple[str, ...]) -> Build:
    constants = {"OUTPUTS": 24, "PDL": True, **chosen.first, **OVERLAPPED}
    if chosen.steps:
        block = chosen.first["BLOCK_T"]
        pointers = {
            "streams": f"tensordesc<bf16[{block}, {hopper.STEP}],{hopper.layout(16)!r}>",
            "fn": f"tensordesc<fp32[32, {hopper.STEP}],{hopper.layout(32)!r}>",
            "part_ptr": "*fp32",
        }
        integers, aligned, kernel = ("num_rows", "K", "steps"), ("K",), hopper.partial_hopper_kernel
        if chosen.walked:
            pointers["fn_ptr"] = "*fp32"
            del pointers["fn"]
            integers, kernel = ("num_rows", "K", "tiles"), partial_columns_kernel
    else:
        streams = "*i16" if chosen.halves else "*bf16"
        pointers = {"streams_ptr": streams, "fn_ptr": "*fp32", "part_ptr": "*fp32"}
        integers, aligned = ("streams_stride", "num_rows", "K"), ("streams_stride", "K")
        kernel = partial_kernel
    return _build(name, kernel, pointers, integers, constants, aligned, only=only)


def _finish(name: str, chosen: Tiles, iterations: int, only: tuple[str, ...]) -> Build:
    pointers = ("part_ptr", "sum_ptr", "base_ptr", "scale_ptr", "pre_ptr", "post_ptr", "comb_ptr")
    return _build(
        name,
        finish_kernel,
        dict.fromkeys(pointers, "*fp32"),
        ("num_rows", "num_splits", "K"),
        {
            "ITERATIONS": iterations,
            "FAST": True,
            "PDL": chosen.early,
            **chosen.second,
            **(OVERLAPPED if chosen.early else {}),
        },
        floats=("norm_eps", "hc_eps"),
        only=only,
    )


def _build(
    name: str,
    kernel: object,
    pointers: Mapping[str, str],
    integers: tuple[str, ...],
    constants: Mapping[str, Any],
    aligned: tuple[str, ...] = (),
    floats: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
) -> Build:
    """``constants`` hold the launch options too, in lower case."""
    return Build(
        name=name,
        kernel=kernel,
        signature={**pointers, **dict.fromkeys(integers, "i32"), **dict.fromkeys(floats, "fp32")},
        constants={key: value for key, value in constants.items() if key.isupper()},
        aligned=(*(name for name, kind in pointers.items() if kind.startswith("*")), *aligned),
        only=only,
        options={key: value for key, value in constants.items() if not key.isupper()},
    )
