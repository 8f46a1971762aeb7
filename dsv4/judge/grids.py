"""What a stored format can hold, in numpy: the grid of an element under the scale of its block.

Written from the formats' definitions (OCP 8-bit floating point 1.0, OCP Microscaling 1.0, the
record's page in the design), not from ``kernels/formats``: the judge shares nothing with what it
judges. Formats are named element_scale_group.

A *step* (a unit in the last place of the stored format) is the spacing of the element's values
around ``|x| / scale``, times the scale: that of the binade of the exact value, the smallest one
among subnormals and the largest one beyond the end. Rounding to nearest is at most half a step
off, but for what saturates or is lost with its block, which :meth:`Format.nearest` says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dsv4.judge.metrics import Array

FUZZ = 2.0**-20  # relative error that two FP32 divisions may put on a scale before it is rounded
E4M3_FLOOR = np.float32(1e-4)  # least amax of an FP8 block
E2M1_FLOOR = 6 * 2.0**-126
SMALLEST_SCALE = 2.0**-9  # of E4M3


@dataclass(frozen=True)
class Element:
    """Floating-point values of ``mantissa`` bits and exponents ``least`` to ``most``, with subnormals."""

    mantissa: int
    least: int
    most: int
    largest: float

    def step(self, size: Array) -> Array:
        """Spacing of values around magnitudes of any shape, FP64; NaN for NaN."""
        exponent = np.frexp(size)[1] - 1
        exponent = np.where(size == 0, self.least, np.clip(exponent, self.least, self.most))
        return np.where(np.isfinite(size), np.ldexp(1.0, exponent - self.mantissa), np.nan)

    def round(self, size: Array) -> Array:
        """Nearest value to each magnitude, ties to even, saturating."""
        step = self.step(size)
        return np.minimum(np.rint(size / step) * step, self.largest)


E4M3 = Element(3, -6, 8, 448.0)
E2M1 = Element(1, 0, 2, 6.0)
BF16 = Element(7, -126, 127, (2 - 2.0**-7) * 2.0**127)


def power_of_two(amax: Array, largest: float) -> Array:
    """Smallest power of two ``s`` with ``largest * s >= amax``, exactly; NaN where amax is not finite."""
    fraction, exponent = np.frexp(np.asarray(amax, np.float64))
    of_largest, exponent_of_largest = np.frexp(largest)
    scale = np.ldexp(1.0, exponent - exponent_of_largest + (fraction > of_largest))
    return np.where(np.isfinite(amax), scale, np.nan)


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a row of values is stored.

    Attributes
    ----------
    name : element_scale_group.
    element : of each value.
    group : values a scale; 0: the whole row.
    scale : rule that makes a scale from the largest magnitude of a block.
    """

    name: str
    element: Element
    group: int = 0
    scale: Literal["none", "power_of_two", "token", "nvfp4", "fp32"] = "none"

    def blocks(self, x: Array) -> Array:
        """``[..., D]`` as ``[..., D / group, group]``."""
        return x.reshape(*x.shape[:-1], -1, self.group or x.shape[-1])

    def scales(self, x: Array, *, launch: bool = False, nudge: float = 0.0) -> Array:
        """Scale of each block that the format's definition asks for.

        Parameters
        ----------
        x : (..., R, D) float32
        launch : NVFP4: one gsa for all rows, not one a row.
        nudge : relative change of what a scale is rounded from, to see whether it sits on a tie.

        Returns
        -------
        (..., R, D / group) FP64
            0 where NVFP4's own scale rounds to 0.
        """
        amax = np.abs(self.blocks(x)).max(-1) * np.float64(1 + nudge)
        if self.scale == "none":
            return np.ones_like(amax, np.float64)
        if self.scale == "fp32":
            return (np.maximum(amax, E4M3_FLOOR).astype(np.float32) / np.float32(448)).astype(np.float64)
        if self.scale == "nvfp4":
            return _nvfp4(np.abs(x), amax, launch=launch)
        floor = E2M1_FLOOR if self.element is E2M1 else E4M3_FLOOR
        scale = power_of_two(np.maximum(amax, np.float64(floor)), self.element.largest)
        return scale.max(-1, keepdims=True) if self.scale == "token" else scale

    def spread(self, scale: Array, size: int) -> Array:
        """Scale of each of ``size`` values: (..., blocks) to (..., size)."""
        return np.repeat(scale, size // scale.shape[-1], axis=-1)

    def nearest(self, x: Array, scale: Array, step: Array) -> Array:
        """Steps between a value and what a correct store makes of it.

        Parameters
        ----------
        x : (..., D) float32
        scale, step : (..., D) FP64
            Of each value; a scale of 0 stores 0.
        """
        size = np.abs(x) / np.where(scale == 0, 1.0, scale)
        stored = size
        if self.scale == "token":  # made from the codes of a block of 64, each under its own scale
            own = self.spread(FORMATS["e4m3_ue8m0_64"].scales(x), x.shape[-1])
            stored = self.element.round(np.abs(x) / own) * own / scale
        stored = np.where(scale == 0, 0.0, self.element.round(stored))
        return np.abs(size - stored) * np.where(scale == 0, 1.0, scale) / step


def _nvfp4(size: Array, amax: Array, *, launch: bool) -> Array:
    """E4M3 of ``amax / 6 / gsa`` in FP32, times ``gsa = amax of the row (or of all rows) / 2688``."""
    of_row = size.max(-1, keepdims=True)
    of_row = of_row.max(-2, keepdims=True) if launch else of_row
    gsa = (of_row.astype(np.float32) / np.float32(2688)).astype(np.float32)
    sixth = (amax / 6).astype(np.float32)
    ideal = sixth / np.where(gsa == 0, np.float32(1), gsa)
    return E4M3.round(ideal.astype(np.float64)) * gsa.astype(np.float64)


FORMATS: Mapping[str, Format] = {
    form.name: form
    for form in (
        Format(name="e4m3_ue8m0_64", element=E4M3, group=64, scale="power_of_two"),
        Format(name="e4m3_ue8m0_128", element=E4M3, group=128, scale="power_of_two"),
        Format(name="e4m3_fp32_token", element=E4M3, group=64, scale="token"),
        Format(name="e4m3_fp32_row", element=E4M3, scale="fp32"),
        Format(name="e2m1_ue8m0_32", element=E2M1, group=32, scale="power_of_two"),
        Format(name="e2m1_e4m3_16", element=E2M1, group=16, scale="nvfp4"),
        Format(name="bf16", element=BF16),
    )
}
