"""Runs at the same time: each on a GPU of its own, the next one waits, an engine has them all."""

import os
import threading
from types import SimpleNamespace

import pytest

from dsv4 import device
from dsv4.commits import gpus, run
from dsv4.commits.gpus import own_gpu


@pytest.fixture
def two(monkeypatch):
    """A machine of which two GPUs may be used."""
    monkeypatch.setenv(device.VISIBLE, "4,7")
    monkeypatch.setattr(gpus, "visible", lambda: ["4", "7"])
    monkeypatch.setattr(gpus, "WAIT", 0.01)


def waits(folder, **options):
    """Whether a run has to wait for a GPU: it is let go in another thread, on locks of its own."""
    started = threading.Event()

    def hold():
        with own_gpu(folder, **options):
            started.set()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    return thread, not started.wait(0.3)


def test_each_run_sees_one_gpu_and_the_third_waits(two, tmp_path):
    with own_gpu(tmp_path):
        assert os.environ[device.VISIBLE] == "4"
        with own_gpu(tmp_path):
            assert os.environ[device.VISIBLE] == "7"
            thread, waited = waits(tmp_path)
            assert waited
        thread.join(10)
        assert not thread.is_alive()
    assert os.environ[device.VISIBLE] == "4,7"


def test_an_engine_has_them_all(two, tmp_path):
    with own_gpu(tmp_path, every=True):
        assert os.environ[device.VISIBLE] == "4,7"
        thread, waited = waits(tmp_path)
        assert waited
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("given", "count", "names"), [(None, 2, ["0", "1"]), ("4, 7", 2, ["4", "7"]), ("", 0, [])]
)
def test_gpus_are_named_as_the_variable_names_them(monkeypatch, given, count, names):
    monkeypatch.setattr(device, "_driver", lambda: (None, count))
    monkeypatch.delenv(device.VISIBLE, raising=False)
    if given is not None:
        monkeypatch.setenv(device.VISIBLE, given)
    assert device.visible() == names


@pytest.mark.parametrize(
    ("engine", "kind", "asked"), [(None, "ref", None), (None, "kernel", False), ("theirs", "ref", True)]
)
def test_a_run_on_refs_asks_for_none(monkeypatch, engine, kind, asked):
    taken = []
    monkeypatch.setattr(run, "own_gpu", lambda folder, every: taken.append(every))
    monkeypatch.setattr(run, "backend_of", lambda config: SimpleNamespace(kind=kind))
    config = SimpleNamespace(commits=SimpleNamespace(engine=engine))
    run._gpu_of(SimpleNamespace(config=config, results=None))
    assert taken == ([] if asked is None else [asked])
