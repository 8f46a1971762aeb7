"""What a rounding point is: a function that stores values and reads them back.

Every ref takes its rounding points as keyword arguments of this type and applies them to
values that it has computed in FP64 and rounded once to FP32. With :func:`exact` (the default
everywhere) a ref is the equations; with a plan's formats it is that plan's exact numerics.
"""

from collections.abc import Callable

from torch import Tensor

Round = Callable[[Tensor], Tensor]


def exact(x: Tensor) -> Tensor:
    """Round nothing: the rounding point of the equations."""
    return x
