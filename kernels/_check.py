"""What the tests of the ops share: inputs, comparisons, and stores in numpy and ml_dtypes.

A rounding point is proved three ways: what reaches it (:class:`Spy`), what leaves the op
(:func:`assert_stored_once`, or an emulation in the op's own test), and that a wrong emulation
(rounding dropped, doubled, moved) gives other bits on the same inputs (:func:`assert_differs`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.formats import _oracle, bf16
from kernels.rounding import Round, exact

SIZES = (0, 1, 3, 127, 129)
THREADS = (1, 2)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: Gluon has no interpreter")


def draw(*shape: int, seed: int, decades: float = 0.0) -> Tensor:
    """FP32 normal values; with ``decades``, each times 10^u, u uniform in +-decades."""
    rng = np.random.default_rng([seed, *shape])
    x = rng.standard_normal(shape) * 10.0 ** rng.uniform(-decades, decades, shape)
    return torch.from_numpy(x.astype(np.float32))


def to_bf16(x: np.ndarray) -> np.ndarray:
    """FP32 values of FP32 values stored as BF16, by ml_dtypes."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def to_fp8(x: np.ndarray, group: int) -> np.ndarray:
    """FP32 values of FP32 values stored in the FP8 block format, by ml_dtypes."""
    return _oracle.block_round(x, group, "e4m3")[2]


def to_nvfp4(x: np.ndarray, gsa: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """E2M1 value x E4M3 scale (T, K) and gsa (T, 1) of finite FP32 rows, by ml_dtypes."""
    gsa = np.asarray(np.abs(x).max(-1, keepdims=True) / np.float32(2688) if gsa is None else gsa)
    groups = x.reshape(len(x), x.shape[1] // 16, 16)
    with np.errstate(invalid="ignore", divide="ignore"):
        ideal = np.abs(groups).max(-1) / np.float32(6) / gsa
        scale = _oracle.e4m3_decode(_oracle.e4m3_encode(np.where(gsa == 0, np.float32(0), ideal)))
        scaled = groups / (scale * gsa)[..., None]
    codes = _oracle.e2m1_encode(np.where((scale * gsa)[..., None] == 0, np.float32(0), scaled))
    return (_oracle.e2m1_decode(codes) * scale[..., None]).reshape(x.shape), gsa


def bits(x: Tensor | np.ndarray) -> np.ndarray:
    """Integer bits of FP32, FP64 or integer values, every NaN alike."""
    array = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    if array.dtype.kind != "f":
        return array
    return np.where(np.isnan(array), np.nan, array).astype(array.dtype).view(f"u{array.dtype.itemsize}")


def num_changed(one: Tensor | np.ndarray, other: Tensor | np.ndarray) -> int:
    """Elements whose bits differ."""
    assert tuple(one.shape) == tuple(other.shape)
    return int((bits(one) != bits(other)).sum())


@contextmanager
def not_launched() -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Kernels that would be launched inside, and are not: the function, its arguments and launch options by name."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    held: list[tuple[Any, dict[str, Any]]] = []

    def keep(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        held.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | kwargs))

    before = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}
    try:
        for kind in before:
            kind.run = keep
        yield held
    finally:
        for kind, run in before.items():
            kind.run = run


def assert_bitwise(got: Tensor | np.ndarray, want: Tensor | np.ndarray) -> None:
    """Equal shapes, dtypes and bits; any NaN equals any other. Names the first element that differs."""
    assert tuple(got.shape) == tuple(want.shape)
    got_bits, want_bits = bits(got), bits(want)
    assert got_bits.dtype == want_bits.dtype
    bad = np.argwhere(got_bits != want_bits)
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        raise AssertionError(f"{len(bad)} of {got_bits.size} differ, first at {at}: {got[at]} for {want[at]}")


def assert_differs(one: Tensor | np.ndarray, other: Tensor | np.ndarray) -> None:
    """At least one element has other bits: these inputs can tell the two apart."""
    assert num_changed(one, other), "the planted fault changed no bit: the inputs cannot see it"


def assert_nearest(got: Tensor, want: np.ndarray, slack: np.ndarray | float = 0.0) -> None:
    """``got`` (FP32) is ``want`` (FP64 or wider) rounded once, after an error of at most ``slack``."""
    assert got.dtype == torch.float32
    assert tuple(got.shape) == want.shape
    value = got.numpy()
    # 2^-40: the oracle's own FP64 error, far under an FP32 ulp
    half_ulp = np.spacing(np.abs(value)).astype(np.float64) / 2 + np.abs(want) * 2.0**-40
    error = np.abs(value.astype(want.dtype) - want)
    bad = np.argwhere(~(error <= half_ulp + slack))
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        raise AssertionError(f"{len(bad)} of {value.size} off, first at {at}: {value[at]!r} for {want[at]!r}")


class Spy:
    """A rounding point that keeps what it was given and what it gave back."""

    def __init__(self, rounding: Round = exact) -> None:
        self._rounding = rounding
        self.given: list[Tensor] = []
        self.returned: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        """Round ``x``."""
        y = self._rounding(x)
        self.given.append(x.clone())
        self.returned.append(y.clone())
        return y


def assert_stored_once(op: Callable[[Round], Tensor]) -> None:
    """``op(out)`` is ``out`` of the equations' FP32 result: the last step, applied once, to all of it."""
    plain = op(exact)
    assert plain.dtype == torch.float32
    spy = Spy(bf16.round)
    stored = op(spy)
    assert len(spy.given) == 1
    assert_bitwise(spy.given[0], plain)
    assert_bitwise(stored, to_bf16(plain.numpy()))
    assert_differs(stored, plain)  # dropped
    assert_bitwise(op(lambda x: 2 * x), 2 * plain)  # no step follows it; twice would be 4
    twice = op(lambda x: _uneven(_uneven(x)))
    assert_bitwise(op(_uneven), _uneven(plain))
    assert_differs(op(_uneven), twice)  # doubled


def _uneven(x: Tensor) -> Tensor:
    """A store that shows how often it was applied."""
    return bf16.round(x * 0.75)


def assert_fault_seen(op: Callable[[], object]) -> None:
    """``op``, a comparison on a planted fault, fails as an assertion."""
    try:
        op()
    except AssertionError:
        return
    raise AssertionError("the planted fault was not seen")


def assert_same_rows(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """NVFP4 codes, scale bytes and gsa bitwise; any NaN scale byte equals any other."""
    assert_bitwise(got[2].cpu(), want[2].cpu())
    assert_bitwise(*(rows[1].cpu().view(torch.float8_e4m3fn).float() for rows in (got, want)))
    assert_bitwise(got[0].cpu(), want[0].cpu())


def assert_same_fp8(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """FP8 codes and scales bitwise; any NaN equals any other."""
    assert_bitwise(*(rows[0].cpu().float() for rows in (got, want)))
    assert_bitwise(got[1].cpu(), want[1].cpu())


def assert_rows_alone(op: Callable[[Mapping[str, Tensor]], Tensor], rows: Mapping[str, Tensor]) -> None:
    """Every row of ``op(rows)`` has the bits it has alone, in a split, and in another order."""
    whole = op(rows)
    count = len(whole)
    for row in {0, count // 2, count - 1}:
        assert_bitwise(op({k: v[row : row + 1] for k, v in rows.items()}), whole[row : row + 1])
    cut = count // 3
    assert_bitwise(op({k: v[cut:] for k, v in rows.items()}), whole[cut:])
    order = torch.from_numpy(np.random.default_rng(count).permutation(count))
    assert_bitwise(op({k: v[order] for k, v in rows.items()}), whole[order])


def assert_replay_equals_eager(
    launch: Callable[[], object], outputs: Sequence[Tensor], change: Callable[[], object]
) -> None:
    """A CUDA graph writes the bytes of eager launches: twice, and again after ``change`` of the inputs in place."""
    launch()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    seen = []
    for turn in range(2):
        seen.append(_written(launch, outputs))
        for _ in range(2):
            for got, want in zip(_written(graph.replay, outputs), seen[-1], strict=True):
                assert torch.equal(got, want)
        if turn == 0:
            change()
    assert any(not torch.equal(one, other) for one, other in zip(*seen, strict=True)), "nothing was changed"


def _written(launch: Callable[[], object], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Bytes of the outputs, poisoned before."""
    for output in outputs:
        output.view(torch.uint8).fill_(0xAA)
    launch()
    torch.cuda.synchronize()
    return [output.view(torch.uint8).clone() for output in outputs]


def assert_threads_agree(op: Callable[[], Tensor]) -> None:
    """The same bits with one thread and with two."""
    before = torch.get_num_threads()
    try:
        results = []
        for count in THREADS:
            torch.set_num_threads(count)
            results.append(op())
    finally:
        torch.set_num_threads(before)
    assert_bitwise(results[0], results[1])
