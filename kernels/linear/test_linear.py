"""Linear layers: each activation format against ml_dtypes, the product and its epilogue, the store."""

import math

import numpy as np
import pytest
import torch

from kernels._check import (
    SIZES,
    assert_bitwise,
    assert_differs,
    assert_nearest,
    assert_rows_alone,
    assert_stored_once,
    assert_threads_agree,
    draw,
    num_changed,
    to_bf16,
    to_fp8,
    to_nvfp4,
)
from kernels.formats import bf16, fp8_block, mxfp4, nvfp4
from kernels.linear.ref import (
    READS,
    Activation,
    Weight,
    grouped_linear,
    linear,
    plain_weight,
    quantise_activation,
)
from kernels.matmul.ref import MAX_K

K, N = 256, 19
FORMATS = ("nvfp4", "mxfp4", "fp8", "bf16", "fp32")


def weight_of(weight_format, *, k=K, n=N, seed=0):
    """A stored weight of each format, as a checkpoint would give it."""
    matrix = draw(n, k, seed=seed)
    if weight_format == "nvfp4":
        tensor_gsa = matrix.abs().max() / 2688
        codes, scales, _ = nvfp4.quantise(matrix, tensor_gsa)
        values = nvfp4.scaled_values(codes, scales).double().T.contiguous()
        return Weight(values=values, scale=tensor_gsa.double(), format="nvfp4")
    if weight_format == "fp8":
        matrix = fp8_block.dequantise_weight(*fp8_block.quantise_weight(matrix))
    elif weight_format == "mxfp4":
        matrix = mxfp4.round(matrix)
    elif weight_format == "bf16":
        matrix = bf16.round(matrix)
    return plain_weight(matrix, weight_format)


def rows_of(T, seed=1):
    """Rows of very different sizes, one of them zero."""
    x = draw(T, K, seed=seed, decades=1) * 10.0 ** draw(T, 1, seed=seed + 1)
    if T > 2:
        x[1] = 0
    return x


def stored(x, weight_format):
    """Values as the GEMM reads them, and the row scale, in numpy."""
    x = x.numpy()
    if weight_format == "nvfp4":
        return to_nvfp4(x)
    return {
        "fp8": lambda: to_fp8(x, 128),
        "mxfp4": lambda: to_fp8(x, 128),
        "bf16": lambda: to_bf16(x),
        "fp32": lambda: x,
    }[weight_format](), None


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("T", SIZES)
def test_stored_activations_equal_the_emulation(T, weight_format):
    x = rows_of(T)
    got = quantise_activation(x, weight_format)
    values, scale = stored(x, weight_format)
    assert_bitwise(got.values, values)
    assert got.values.dtype == torch.float32
    assert got.narrow == (weight_format != "fp32")
    if scale is None:
        assert got.row_scale is None
        assert_bitwise(got.dequantised(), values)
    else:
        assert_bitwise(got.row_scale, scale)
        assert_bitwise(got.dequantised(), values * scale)
    if T > 2 and weight_format != "fp32":
        assert_differs(got.dequantised(), x)  # dropped


@pytest.mark.parametrize("weight_format", FORMATS)
def test_values_have_at_most_nine_significant_bits_where_narrow(weight_format):
    for source in (quantise_activation(rows_of(129), weight_format).values, weight_of(weight_format).values):
        low_bits = source.double().contiguous().view(torch.int64) & ((1 << 44) - 1)
        assert bool(low_bits.any()) == (weight_format == "fp32")


@pytest.mark.parametrize("weight_format", FORMATS)
def test_without_rounding_the_input_passes_as_it_is(weight_format):
    x = rows_of(5)
    got = quantise_activation(x, weight_format, enabled=False)
    assert_bitwise(got.values, x)
    assert got.row_scale is None
    assert not got.narrow


def test_a_second_quantisation_changes_nothing_but_in_nvfp4_blocks_of_subnormal_scale():
    x = rows_of(129)
    for weight_format in FORMATS:
        once = quantise_activation(x, weight_format).dequantised()
        np.testing.assert_allclose(
            quantise_activation(once, weight_format).dequantised(), once, rtol=2.0**-22
        )
    x = torch.zeros(1, K)
    x[0, 0], x[0, 16] = 2688.0, 6 * 1.6 * 2.0**-9  # gsa 1; scale 1.6 -> 2 subnormal steps, code 4.8 -> 4
    once = quantise_activation(x, "nvfp4").dequantised()
    twice = quantise_activation(once, "nvfp4").dequantised()  # 4 * 2 / 6 -> 1 step, code 8 -> 6
    assert (once[0, 16], twice[0, 16]) == (8 * 2.0**-9, 6 * 2.0**-9)


def test_a_launch_gsa_ties_a_row_to_its_batch_and_a_row_gsa_does_not():
    x = rows_of(40)
    launch = quantise_activation(x, "nvfp4", gsa="launch")
    top = (x.abs().max() / 2688).expand(40, 1)
    values, _ = to_nvfp4(x.numpy(), top.numpy())
    assert_bitwise(launch.values, values)
    assert_bitwise(launch.row_scale, top)
    assert_differs(
        quantise_activation(x[5:6], "nvfp4", gsa="launch").dequantised(), launch.dequantised()[5:6]
    )
    assert_differs(launch.dequantised(), quantise_activation(x, "nvfp4").dequantised())
    largest = int(x.abs().amax(1).argmax())
    alone = quantise_activation(x[largest : largest + 1], "nvfp4", gsa="launch")
    assert_bitwise(alone.values, launch.values[largest : largest + 1])
    assert quantise_activation(x[:0], "nvfp4", gsa="launch").values.shape == (0, K)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_zero_rows_give_zeros(weight_format):
    x = torch.zeros(3, K)
    x[1] = draw(K, seed=5)
    x[2] = -0.0
    got = linear(quantise_activation(x, weight_format), weight_of(weight_format))
    assert got[[0, 2]].tolist() == [[0.0] * N] * 2
    alone = linear(quantise_activation(x[:1], weight_format), weight_of(weight_format))
    assert_bitwise(alone, got[:1])


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_values_stay_in_their_row(weight_format, bad):
    x, weight = rows_of(5), weight_of(weight_format)
    clean = linear(quantise_activation(x, weight_format), weight)
    x[3, 100] = bad
    got = linear(quantise_activation(x, weight_format), weight)
    assert not got[3].isfinite().any()
    keep = [0, 1, 2, 4]
    assert_bitwise(got[keep], clean[keep])
    if weight_format == "nvfp4":  # one gsa for all: one bad row takes the launch
        assert quantise_activation(x, "nvfp4", gsa="launch").dequantised().isnan().all()


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("T", SIZES)
def test_linear_equals_80_bit_arithmetic(T, weight_format):
    x, weight = rows_of(T), weight_of(weight_format)
    values, scale = stored(x, weight_format)
    want = values.astype(np.longdouble) @ weight.values.numpy().astype(np.longdouble) * float(weight.scale)
    want = want if scale is None else want * scale
    activation = quantise_activation(x, weight_format)
    bound = 2.0**-36 if weight_format == "fp32" else 2.0**-50
    size = K * np.abs(values).max(1, keepdims=True, initial=0) * np.abs(weight.values.numpy()).max(0)
    size = size * float(weight.scale) * (1 if scale is None else scale)
    assert_nearest(linear(activation, weight), want, slack=bound * size.astype(np.float64))


def test_equations_on_a_quantised_weight_apply_its_scale_once():
    x, weight = rows_of(9), weight_of("nvfp4")
    got = linear(quantise_activation(x, "nvfp4", enabled=False), weight)
    dequantised = weight.values.numpy() * float(weight.scale)
    want = x.numpy().astype(np.longdouble) @ dequantised.astype(np.longdouble)
    slack = 2.0**-34 * K * np.abs(x.numpy()).max(1, keepdims=True) * np.abs(dequantised).max()
    assert_nearest(got, want, slack=slack)


def test_the_epilogue_rounds_once_and_faults_in_it_would_show():
    x, weight = rows_of(129), weight_of("nvfp4")
    activation = quantise_activation(x, "nvfp4")
    got = linear(activation, weight)
    product = activation.values.double() @ weight.values
    row, scale = activation.row_scale, weight.scale
    assert_bitwise(got, (product * scale * row.double()).float())
    assert_differs(got, (product.float() * scale.float()) * row)  # FP32 between the scales
    assert_differs(got, (product * scale).float() * row)
    assert_differs(got, (product * scale * row.double().amax()).float())  # undone with the maximum
    assert_differs(got, (product * row.double()).float())  # tensor scale forgotten
    assert_differs(got, (product * scale).float())  # row scale forgotten


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("T", SIZES[1:])
def test_a_row_does_not_see_its_batch(T, weight_format):
    weight = weight_of(weight_format)
    assert_rows_alone(
        lambda r: linear(quantise_activation(r["x"], weight_format), weight), {"x": rows_of(T, seed=3)}
    )
    rows = quantise_activation(rows_of(T, seed=3), weight_format)
    index = torch.arange(T).flip(0)
    assert_bitwise(linear(rows[index], weight), linear(rows, weight).flip(0))


@pytest.mark.parametrize("weight_format", FORMATS)
def test_columns_threads_and_powers_of_two(weight_format):
    x, weight = rows_of(33, seed=7), weight_of(weight_format, n=67)
    rows = quantise_activation(x, weight_format)
    whole = linear(rows, weight)
    part = Weight(values=weight.values[:, 5:8].contiguous(), scale=weight.scale, format=weight.format)
    assert_bitwise(linear(rows, part), whole[:, 5:8])
    assert_threads_agree(lambda: linear(rows, weight))
    assert_bitwise(linear(quantise_activation(x * 4, weight_format), weight), whole * 4)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_out_is_the_last_step_and_happens_once(weight_format):
    rows, weight = quantise_activation(rows_of(129), weight_format), weight_of(weight_format)
    assert_stored_once(lambda out: linear(rows, weight, out=out))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("T", SIZES)
def test_a_whole_layer_in_bf16_equals_its_emulation(T, weight_format):
    x, weight = rows_of(T, seed=9), weight_of(weight_format)
    values, scale = stored(x, weight_format)
    product = values.astype(np.float64) @ weight.values.numpy() * float(weight.scale)
    want = to_bf16((product if scale is None else product * scale.astype(np.float64)).astype(np.float32))
    assert_bitwise(linear(quantise_activation(x, weight_format), weight, out=bf16.round), want)


def test_an_fp32_weight_is_never_taken_for_narrow():
    weight = weight_of("fp32")
    narrow = Activation(values=bf16.round(draw(129, K, seed=10, decades=8)), narrow=True)
    assert_differs((narrow.values.double() @ weight.values).float(), linear(narrow, weight))
    wide = Activation(values=narrow.values)
    assert_bitwise(linear(narrow, weight), linear(wide, weight))


def test_sums_too_long_to_be_exact_are_refused():
    size = MAX_K + 1
    for weight_format, narrow in (("fp32", False), ("bf16", True)):
        weight = Weight(
            values=torch.zeros(size, 1, dtype=torch.float64),
            scale=torch.ones((), dtype=torch.float64),
            format=weight_format,
        )
        with pytest.raises(ValueError, match="over 32768"):
            linear(Activation(values=torch.zeros(1, size), narrow=narrow), weight)


G, GROUP_N = 3, 5


@pytest.mark.parametrize("scales", ["one", "per group"])
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("T", SIZES)
def test_grouped_linear_is_one_linear_a_group(T, weight_format, scales):
    parts = [weight_of(weight_format, k=64, n=GROUP_N, seed=g) for g in range(G)]
    scale = torch.stack([part.scale for part in parts])
    weight = Weight(
        values=torch.stack([part.values for part in parts]),
        scale=scale if scales == "per group" else scale[0],
        format=weight_format,
    )
    x = draw(T, G * 64, seed=11, decades=1)
    rows = quantise_activation(x, "bf16" if READS[weight_format] == "fp8" else weight_format)
    got = grouped_linear(rows, weight)
    assert got.shape == (T, G * GROUP_N)
    for g in range(G):
        values = rows.values[:, g * 64 : (g + 1) * 64]
        alone = Activation(values=values, row_scale=rows.row_scale, narrow=rows.narrow)
        part = Weight(
            values=weight.values[g], scale=scale[g if scales == "per group" else 0], format=weight_format
        )
        assert_bitwise(got[:, g * GROUP_N : (g + 1) * GROUP_N], linear(alone, part))


def test_grouped_linear_stores_once_and_a_row_does_not_see_its_batch():
    weight = plain_weight(draw(G, GROUP_N, 64, seed=12), "bf16")
    x = draw(129, G * 64, seed=13)
    assert_stored_once(lambda out: grouped_linear(quantise_activation(x, "bf16"), weight, out=out))
    assert_rows_alone(lambda r: grouped_linear(quantise_activation(r["x"], "bf16"), weight), {"x": x})


def test_a_row_scale_spans_all_groups_of_the_row():
    weight = plain_weight(torch.ones(2, 1, 16), "nvfp4")
    x = torch.ones(1, 32)
    x[0, 16:] = 1000.0
    rows = quantise_activation(x, "nvfp4")
    got = grouped_linear(rows, weight)
    assert_bitwise(got, rows.dequantised().double().view(1, 2, 16).sum(-1).float())
    assert (
        num_changed(got[:, :1], torch.tensor([[16.0]])) == 1
    )  # the small group pays for the large one's scale


@pytest.mark.parametrize("weight_format", FORMATS)
def test_activations_cut_and_joined_are_the_same_rows(weight_format):
    rows = quantise_activation(rows_of(9), weight_format)
    joined = Activation.cat([rows[:2], rows[2:2], rows[2:]])
    assert_bitwise(joined.dequantised(), rows.dequantised())
    assert joined.narrow == rows.narrow
    assert (joined.row_scale is None) == (weight_format != "nvfp4")
    assert not Activation.cat([rows, Activation(values=rows.values, row_scale=rows.row_scale)]).narrow


def test_a_stack_gives_one_expert_at_a_time():
    stack = Weight(
        values=draw(3, 16, 4, seed=14).double(), scale=torch.tensor([1.0, 2.0, 4.0]).double(), format="bf16"
    )
    expert = stack[2]
    assert_bitwise(expert.values, stack.values[2])
    assert expert.scale.item() == 4.0
    assert expert.format == "bf16"


def test_plain_weight_transposes_and_keeps_every_bit():
    matrix = draw(2, 5, 7, seed=15)
    weight = plain_weight(matrix, "fp32")
    assert_bitwise(weight.values, matrix.double().transpose(1, 2))
    assert weight.scale.tolist() == [1.0, 1.0]
    assert plain_weight(matrix[0], "bf16").scale.shape == ()
