"""The one way from the audit to kernels; nothing else imports them, so a run on refs needs no Triton."""

from dsv4.model.config import ModelConfig
from dsv4.model.transformer import Transformer
from dsv4.model.weights import ModelWeights
from dsv4.plan import Plan
from dsv4.run.watch import Watch


def kernel_model(
    config: ModelConfig,
    weights: ModelWeights,
    plan: Plan,
    *,
    page_size: int,
    device: str,
    watch: Watch | None,
) -> Transformer:
    """A model on a GPU, with the assembler that is right; or on the CPU under Triton's interpreter.

    Raises
    ------
    NoKernelError
        The plan, a size or a stored format has no kernel.
    """
    import torch

    if device == "cuda":
        from kernels import toolchain

        toolchain.select(blackwell=torch.cuda.get_device_capability()[0] >= 10)
    else:
        from kernels.interpreter import install

        install()  # before Triton compiles anything
    from dsv4.backend.model import not_seen
    from dsv4.backend.stepping import SteppingTransformer

    seen = watch.look if watch else not_seen
    return SteppingTransformer(config, weights, plan, page_size=page_size, device=device, seen=seen)
