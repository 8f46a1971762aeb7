"""What a rounding point is: a function that stores values and reads them back.

Every ref takes its rounding points as keyword arguments of this type and applies them to
values that it has computed in FP64 and rounded once to FP32. With :func:`exact` (the default
everywhere) a ref is the equations; with a plan's formats it is that plan's exact numerics.
Where an op's own parts meet in FP32 on any hardware (attention's logits and probabilities, mHC's
flat norm, an expert's gate, up and hidden values) that one FP32 rounding is there for all plans.
"""

from collections.abc import Callable

from torch import Tensor

Round = Callable[[Tensor], Tensor]


def exact(x: Tensor) -> Tensor:
    """Round nothing: the rounding point of the equations."""
    return x
