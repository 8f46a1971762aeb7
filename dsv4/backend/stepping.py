"""The model on kernels as generation takes it: on a GPU its decode steps are replays of one CUDA graph."""

from collections.abc import Sequence
from typing import Any

from dsv4.backend.model import KernelTransformer
from dsv4.backend.step import DecodeStep
from dsv4.model.cache import SequenceCache


class SteppingTransformer(KernelTransformer):
    """A :class:`~dsv4.backend.model.KernelTransformer` that captures its decode steps.

    Attributes
    ----------
    captures : whether it does: on a CUDA device.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.captures = self.device.type == "cuda"

    def captured(self, caches: Sequence[SequenceCache], most: int) -> DecodeStep | None:
        """See :meth:`dsv4.model.transformer.Transformer.captured`; its bits are those of eager steps."""
        return DecodeStep(self, caches, most) if self.captures else None  # type: ignore[arg-type]
