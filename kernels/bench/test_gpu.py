"""The sampler on a pretended device: how long a graph is, what is captured, and that ceilings are rates."""

import contextlib

import pytest
import torch

from kernels.bench import gpu

LAUNCH_US, GRAPH_US = 5.0, 8.0  # of the pretended device: one launch; what a graph's own launch costs


class Device:
    """Stands in for torch: a clock that launches and copies move on."""

    def __init__(self):
        self.clock, self.recording, self.cuda = 0.0, None, self

    def __getattr__(self, name):
        return getattr(torch, name)

    def launch(self, _copy):
        if self.recording is None:
            self.clock += LAUNCH_US
        else:
            self.recording.launches += 1

    def Event(self, enable_timing):  # noqa: N802 - torch's name
        assert enable_timing
        return Event(self)

    def CUDAGraph(self):  # noqa: N802 - torch's name
        return Graph(self)

    @contextlib.contextmanager
    def graph(self, graph):
        self.recording = graph
        yield
        self.recording = None

    def Stream(self):  # noqa: N802 - torch's name
        return self

    def current_stream(self):
        return self

    def wait_stream(self, _other):
        assert self.recording is None

    def stream(self, _stream):
        return contextlib.nullcontext()

    def synchronize(self):
        assert self.recording is None

    def empty_cache(self):
        pass

    def mem_get_info(self):
        return 2**20, 2**20

    def randint(self, *args, device, **kwargs):
        self.clock += 1.0
        return torch.randint(*args, **kwargs)

    def randn(self, *args, device):
        return torch.randn(*args)

    def ones(self, *args, device):
        return torch.ones(*args)


class Event:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.device.clock += 1.0
        self.at = self.device.clock

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at - self.at) / 1000


class Graph:
    def __init__(self, device):
        self.device, self.launches, self.replays = device, 0, 0

    def replay(self):
        self.replays += 1
        self.device.clock += GRAPH_US + LAUNCH_US * self.launches


@pytest.fixture
def device(monkeypatch):
    pretended = Device()
    monkeypatch.setattr(gpu, "torch", pretended)
    return pretended


def test_a_graph_repeats_all_input_sets_until_its_own_launch_costs_nothing(device):
    sampler = gpu.GraphSampler(device.launch, copies=3)
    graph = sampler._graph
    assert graph.launches % 3 == 0
    assert graph.launches * LAUNCH_US > gpu.GRAPH_US / 2
    assert graph.replays * graph.launches * LAUNCH_US >= gpu.WARM_US / 2
    assert sampler.replay() == pytest.approx(LAUNCH_US, rel=0.01)
    assert sampler.eager() == pytest.approx(LAUNCH_US, rel=0.1)


def test_a_long_launch_is_captured_once_and_many_copies_stay_below_the_limit(device, monkeypatch):
    monkeypatch.setattr(gpu, "GRAPH_US", 1.0)
    assert gpu.GraphSampler(device.launch, copies=4)._graph.launches == 4
    monkeypatch.setattr(gpu, "GRAPH_US", 1e9)
    assert gpu.GraphSampler(device.launch, copies=64)._graph.launches == gpu.MOST_LAUNCHES // 64 * 64


def test_ceilings_are_counted_work_over_time(device, monkeypatch):
    monkeypatch.setattr(gpu, "MATRIX", 64)
    found = gpu.ceilings()
    assert found["copied_bytes"] == 2 * 2**18
    # two events a microsecond apart is all that passes on the pretended device
    assert found["copy_bytes_per_s"] == pytest.approx(found["copied_bytes"] * 1e6)
    assert found["flops_per_s"]["bf16"] == pytest.approx(2 * 64**3 * 1e6)
    assert set(found["flops_per_s"]) | set(found["errors"]) == {"bf16", "fp8"}
