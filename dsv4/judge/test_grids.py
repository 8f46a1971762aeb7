"""Stored formats as grids: hand-computed steps and scales, and every correct quantiser inside half a step."""

import ml_dtypes
import numpy as np
import pytest

from dsv4.judge.grids import BF16, E2M1, E4M3, FORMATS, power_of_two

TYPES = {"e4m3": (E4M3, ml_dtypes.float8_e4m3fn), "e2m1": (E2M1, ml_dtypes.float4_e2m1fn)}
TYPES |= {"bf16": (BF16, ml_dtypes.bfloat16)}


@pytest.mark.parametrize(
    ("element", "size", "step"),
    [
        (E4M3, [0.0, 2.0**-9, 2.0**-6, 1.0, 1.999], [2.0**-9, 2.0**-9, 2.0**-9, 1 / 8, 1 / 8]),
        (E4M3, [2.0, 448.0, 500.0], [1 / 4, 32.0, 32.0]),
        (E2M1, [0.0, 0.3, 1.9, 2.0, 4.0, 6.0, 9.0], [0.5, 0.5, 0.5, 1, 2, 2, 2]),
        (BF16, [1.0, 255.0, 256.0], [2.0**-7, 1.0, 2.0]),
    ],
    ids=["e4m3", "e4m3 at its end", "e2m1", "bf16"],
)
def test_a_step_is_that_of_the_binade(element, size, step):
    assert element.step(np.array(size)).tolist() == step


@pytest.mark.parametrize("name", TYPES)
def test_rounding_is_to_nearest_even_as_in_ml_dtypes(name):
    element, dtype = TYPES[name]
    rng = np.random.default_rng(1)
    size = np.abs(rng.standard_normal(20_000) * np.exp(rng.normal(0, 3, 20_000))).astype(np.float32)
    ties = (np.arange(1, 64) / 16).astype(np.float32)
    size = np.minimum(np.append(size, ties), element.largest).astype(np.float32)
    assert np.array_equal(element.round(size.astype(np.float64)), size.astype(dtype).astype(np.float64))


def test_what_is_not_finite_has_no_step():
    assert np.isnan(E4M3.step(np.array([np.nan, np.inf]))).all()


def test_a_power_of_two_scale_is_exact_next_to_the_edge():
    amax = np.array([448.0, np.nextafter(np.float32(448), np.float32(449)), 224.0, np.inf, np.nan])
    assert power_of_two(amax, 448.0)[:3].tolist() == [1.0, 2.0, 0.5]
    assert np.isnan(power_of_two(amax, 448.0)[3:]).all()


def test_an_fp8_block_has_a_floor_and_a_record_token_one_scale():
    x = np.zeros((1, 128), np.float32)
    x[0, 64] = 448.0
    assert FORMATS["e4m3_ue8m0_64"].scales(x).tolist() == [[2.0**-22, 1.0]]
    assert FORMATS["e4m3_fp32_token"].scales(x).tolist() == [[1.0]]


def test_nvfp4_scales_by_hand():
    x = np.zeros((2, 32), np.float32)
    x[0, 0], x[0, 16], x[1, 0] = 2688.0, 6.25, 6.0  # gsa 1; second block asks for 6.25 / 6 = 1.0417: E4M3 1.0
    form = FORMATS["e2m1_e4m3_16"]
    assert form.scales(x)[0].tolist() == [448.0, 1.0]
    assert form.scales(x)[1, 1] == 0.0
    of_launch = form.scales(x, launch=True)
    assert of_launch[1, 0] == 1.0  # the other row's gsa


def test_nearest_is_half_a_step_but_for_what_saturates_or_is_lost():
    form, size = FORMATS["e2m1_e4m3_16"], np.array([[2.5, 6.4, 0.5]])
    step = form.element.step(size)
    assert form.nearest(size, np.ones((1, 3)), step) == pytest.approx(np.array([[0.5, 0.2, 0.0]]))
    assert form.nearest(size, np.zeros((1, 3)), step).tolist() == [[2.5, 3.2, 1.0]]  # the block's scale is 0


def test_the_aligned_record_rounds_twice_by_definition():
    x = np.zeros((1, 128), np.float32)
    x[0, 0], x[0, 64], x[0, 65] = (
        448.0,
        7.0,
        27.4 * 2**-10,
    )  # scales 1 and 2^-6: the coarse grid has steps of 2^-9
    form = FORMATS["e4m3_fp32_token"]
    scale = form.spread(form.scales(x), 128)
    near = form.nearest(x, scale, form.element.step(np.abs(x)))
    assert near[0, 65] == pytest.approx(
        0.3
    )  # 27.4 is 27 of the fine grid's, 13.5 of the coarse grid's, tie to 14
