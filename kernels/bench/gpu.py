"""What needs a CUDA device: graphs, events, the card's own ceilings."""

import platform
import subprocess
from collections.abc import Callable
from typing import Any

import torch
import triton

from kernels.bench.statistics import spread
from kernels.toolchain import Ptxas

GRAPH_US = 2000.0  # one replay takes this long or longer, so that what a graph's launch costs is under 0.5%
MOST_LAUNCHES = 2000  # in one graph
WARM_US = 20_000.0  # of replays before the first sample: clocks rise, caches fill
EAGER_LAUNCHES = 20
COPY_BYTES = 2**32  # read once and written once: 8.6 GB
MATRIX = 8192
CEILING_SAMPLES = 15


def elapsed_us(run: Callable[[], object]) -> float:
    """Device time of what ``run`` enqueues, in microseconds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end)


class GraphSampler:
    """A path whose launches on all input sets, repeated, are one CUDA graph."""

    def __init__(self, launch: Callable[[int], None], copies: int) -> None:
        self._launch, self._copies = launch, copies
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, and lets libraries allocate outside the capture
            for _ in range(2):
                self._once()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._rounds, self._graph = 1, self._capture(1)
        one = min(elapsed_us(self._graph.replay) for _ in range(3))
        most = max(1, MOST_LAUNCHES // copies)
        self._rounds = min(most, max(1, round(GRAPH_US / one + 0.5)))
        if self._rounds > 1:
            self._graph = self._capture(self._rounds)
        for _ in range(max(3, min(200, int(WARM_US / (one * self._rounds))))):
            self._graph.replay()
        torch.cuda.synchronize()

    def _once(self) -> None:
        for i in range(self._copies):
            self._launch(i)

    def _capture(self, rounds: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                self._once()
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def replay(self) -> float:
        """Microseconds a launch, over all input sets."""
        return elapsed_us(self._graph.replay) / (self._rounds * self._copies)

    def eager(self) -> float:
        """Microseconds a launch without the graph, Python included where it is what takes longest."""
        rounds = max(1, EAGER_LAUNCHES // self._copies)

        def run() -> None:
            for _ in range(rounds):
                self._once()

        return elapsed_us(run) / (rounds * self._copies)


def ceilings() -> dict[str, Any]:
    """Copy bandwidth and matrix rates of this card now, on random data.

    Returns
    -------
    dict
        ``copy_bytes_per_s`` with ``copied_bytes``, and ``flops_per_s`` by operand type; a type that this card or
        torch cannot multiply is left out, and named under ``errors``.
    """
    free, _ = torch.cuda.mem_get_info()
    size = min(COPY_BYTES, free // 4)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    taken = _sampled(lambda: target.copy_(source))
    found: dict[str, Any] = {
        "copied_bytes": 2 * size,
        "copy_us": taken,
        "copy_bytes_per_s": 2 * size / taken["median"] * 1e6,
        "matrix": MATRIX,
        "flops_per_s": {},
        "matrix_us": {},
        "errors": {},
    }
    del source, target
    for kind, make in (("bf16", _bf16_product), ("fp8", _fp8_product)):
        try:
            taken = _sampled(make())
        except (RuntimeError, AttributeError) as error:
            found["errors"][kind] = str(error).splitlines()[0][:300]
            continue
        found["matrix_us"][kind] = taken
        found["flops_per_s"][kind] = 2 * MATRIX**3 / taken["median"] * 1e6
    torch.cuda.empty_cache()
    return found


def _sampled(run: Callable[[], object]) -> dict[str, float]:
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    return spread([elapsed_us(run) for _ in range(CEILING_SAMPLES)])


def _bf16_product() -> Callable[[], object]:
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _fp8_product() -> Callable[[], object]:
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    columns = b.t()  # the second operand has its columns contiguous
    return lambda: torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a, columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def device() -> dict[str, Any]:
    """What the rows were measured on."""
    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "l2_bytes": found.L2_cache_size,
    }


def versions(ptxas: Ptxas) -> dict[str, Any]:
    """Versions of what compiled and launched the kernels."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "driver": _driver(),
        "ptxas": ptxas.record(),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.split("\n")[0].strip() or None
