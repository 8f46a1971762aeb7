"""P4's and P5's figures on this machine's GPU: ``python -m kernels.mhc_rmsnorm_quantise_nvfp4.figures page.md``."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from kernels import toolchain
from kernels.build_spec import FLASH, PRO
from kernels.hc import ref as hc_ref
from kernels.hc.kernel import collapse
from kernels.mhc_rmsnorm_quantise_nvfp4.kernel import mhc_rmsnorm_quantise
from kernels.nvfp4_quantise.kernel import quantise
from kernels.nvfp4_quantise.ref import Nvfp4Rows
from kernels.rmsnorm import ref as norm_ref
from kernels.rmsnorm.kernel import rmsnorm
from kernels.rmsnorm_quantise_nvfp4.figures import Figures, figures, on
from kernels.rmsnorm_quantise_nvfp4.kernel import rmsnorm_quantise

EPS, SEED = 1e-6, 9
TOKENS = (1, 8, 128)
INTRO = """# P4 and P5: what fusing changes

Made by `python -m kernels.mhc_rmsnorm_quantise_nvfp4.figures`; not edited by hand. {machine}.

Gaussian rows and streams, BF16. P4 is RMSNorm and NVFP4 quantiser in one launch, P5 the streams' weighted sum too.
Unfused: a launch each, BF16 between. True: the refs' norm in FP32, never quantised; torch: the formats' NVFP4 of it.
A row's gain is the least-squares factor from the true values to the stored ones.

Must: cosine with the unfused kernels at least 0.999; with the true values within 1e-4 of torch's; each row's gsa
within 2e-6 of the true one. A row's own cosine and gain differ from torch's by what its few moved codes make.
"""
HEADS = (
    *("op", "T", "hidden", "cos, unfused", "cos, true", "torch: cos, true", "row cos off torch"),
    *("gain of a row", "gain off torch", "gsa off"),
    *("codes, unfused", "scale bytes, unfused", "codes, torch", "scale bytes, torch", "must"),
)


def measured(device: torch.device, tokens: int, hidden: int) -> Iterator[tuple[str, Figures]]:
    """P4 and P5 of so many rows."""
    generator = torch.Generator().manual_seed(SEED + tokens + hidden)
    streams = on(torch.randn(tokens, 4, hidden, generator=generator), device)
    pre = torch.sigmoid(torch.randn(tokens, 4, generator=generator)).to(device)
    weight = on(torch.rand(hidden, generator=generator) + 0.5, device)
    x, wide = streams[:, 0].contiguous(), weight.float().cpu()
    got = rmsnorm_quantise(x, weight, eps=EPS).rows
    assert isinstance(got, Nvfp4Rows)
    true = norm_ref.rmsnorm(x.float().cpu(), wide, eps=EPS)
    yield "P4", figures(got, quantise(rmsnorm(x, weight, eps=EPS)), true)
    got = mhc_rmsnorm_quantise(streams, pre, weight, eps=EPS).rows
    assert isinstance(got, Nvfp4Rows)
    true = norm_ref.rmsnorm(hc_ref.collapse(streams.float().cpu(), pre.cpu()), wide, eps=EPS)
    yield "P5", figures(got, quantise(rmsnorm(collapse(streams, pre), weight, eps=EPS)), true)


def cells(op: str, tokens: int, hidden: int, found: Figures) -> tuple[str, ...]:
    """One row of the table."""
    return (
        *(op, str(tokens), str(hidden), f"{found.cos_unfused:.6f}", f"{found.cos_true:.6f}"),
        *(f"{found.cos_torch:.6f}", f"{found.row_cos_off:.1e}"),
        *(
            f"{found.gain_least:.6f} to {found.gain_most:.6f}",
            f"{found.gain_off:.1e}",
            f"{found.gsa_off:.1e}",
        ),
        *(f"{share:.3%}" for share in found[-4:]),
        "met" if found.meet_the_plan() else "missed",
    )


def main(page: Path) -> int:
    """Write the page; 1 if a figure is missed, 2 without a GPU."""
    if not torch.cuda.is_available():
        print("figures: no GPU", file=sys.stderr)
        return 2
    ptxas = toolchain.select(blackwell=torch.cuda.get_device_capability()[0] >= 10)
    device = torch.device("cuda")
    rows = [
        cells(op, tokens, sizes.hidden_size, found)
        for sizes in (FLASH, PRO)
        for tokens in TOKENS
        for op, found in measured(device, tokens, sizes.hidden_size)
    ]
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {ptxas}"
    table = [HEADS, ("---",) * len(HEADS), *sorted(rows, key=lambda row: row[0])]
    page.parent.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(f"| {' | '.join(row)} |" for row in table)
    page.write_text(f"{INTRO.format(machine=machine)}\n{lines}\n")
    print(lines)
    return int(any(row[-1] != "met" for row in rows))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
