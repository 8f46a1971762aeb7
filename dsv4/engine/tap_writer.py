"""Give an engine's tensors to the audit. Copy this one file into your repository; it needs numpy alone.

The audit starts your command once, with a job's folder as its last argument. ``job.json`` in it
says what is asked; ``in/`` holds the reference's inputs, ``out/`` takes your taps. Every tensor
file is in the safetensors format, so that an engine that reads its checkpoint can read its inputs.
The contract and all fields: ``docs/engines.md`` of dsv4-audit.

A Python engine needs::

    serve(Job(sys.argv[1]), run_layer, run, device="H200")
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = 1
MODEL = "model"  # what follows the last layer, beside the layer numbers
CHOICES = ("expert_ids", "topk")
DTYPES = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I32": "<i4", "I64": "<i8", "U8": "|u1", "BF16": "<u2"}

Taps = Mapping[str, Any]
Put = Callable[[int | str, Taps], None]
RunLayer = Callable[[int | str, dict[str, np.ndarray], dict[str, np.ndarray]], Taps]
Run = Callable[[dict[str, Any], Put], None]
RunBatch = Callable[[list[dict[str, Any]]], list[np.ndarray]]


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a safetensors file by name; BF16 as float32.

    Raises
    ------
    ValueError
        The file is no safetensors file, is cut short, or holds another dtype than :data:`DTYPES`.
    """
    raw = Path(path).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    try:
        header = json.loads(raw[8 : 8 + size])
        header.pop("__metadata__", None)
        places = {name: (one["dtype"], one["shape"], *one["data_offsets"]) for name, one in header.items()}
        return {name: _tensor(path, name, raw[8 + size :], *place) for name, place in places.items()}
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no safetensors file: its header cannot be read ({error!r})") from error


def _tensor(
    path: Path, name: str, data: bytes, kind: str, shape: list[int], start: int, stop: int
) -> np.ndarray:
    if kind not in DTYPES:
        raise ValueError(f"{path}: {name} is {kind}; readable: {', '.join(DTYPES)}")
    dtype = np.dtype(DTYPES[kind])
    if stop - start != dtype.itemsize * int(np.prod(shape)) or not 0 <= start <= stop <= len(data):
        raise ValueError(f"{path}: {name} {shape} has bytes {start} to {stop} of {len(data)}: cut short")
    array = np.frombuffer(data[start:stop], dtype).reshape(shape)
    return (array.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else array


def write_tensors(path: Path, tensors: Taps) -> None:
    """Write arrays (or what ``numpy.asarray`` takes) as a safetensors file that appears whole or not at all.

    Raises
    ------
    ValueError
        An array's dtype is not of :data:`DTYPES`.
    """
    names = {np.dtype(code): name for name, code in DTYPES.items() if name != "BF16"}
    arrays = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    header, offset = {}, 0
    for name, array in arrays.items():
        if array.dtype not in names:
            raise ValueError(f"{path}: {name} is {array.dtype}; writable: {', '.join(map(str, names))}")
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape)}
        header[name]["data_offsets"] = [offset, offset + array.nbytes]
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(
        b"".join((len(text).to_bytes(8, "little"), text, *(a.tobytes() for a in arrays.values())))
    )
    part.replace(path)


class Job:
    """What the audit asks of an engine.

    Parameters
    ----------
    folder : the command's last argument.
    rank : which of several ranks this process is; each writes a folder of its own.

    Attributes
    ----------
    content : ``job.json``: checkpoint, plan, modes, layers, prompts, and the taps with their shapes.
    """

    def __init__(self, folder: str | Path, rank: int = 0) -> None:
        self.folder = Path(folder)
        self.content: dict[str, Any] = json.loads((self.folder / "job.json").read_text())
        if self.content["schema"] != SCHEMA:
            raise SystemExit(
                f"{self.folder / 'job.json'}: schema {self.content['schema']}, this tap writer has {SCHEMA};"
                " copy the audit's dsv4/engine/tap_writer.py again"
            )
        self.out = self.folder / "out" / f"rank{rank}"

    def layers(self, mode: str) -> Iterator[tuple[dict[str, Any], int | str]]:
        """Prompts and layers of a mode, in order; a prompt is its entry in ``job.json``."""
        for prompt in self.content["prompts"] if mode in self.content["modes"] else ():
            yield from ((prompt, layer) for layer in self.content["layers"])

    def inputs(self, prompt: Mapping[str, Any], layer: int | str) -> dict[str, np.ndarray]:
        """Return the reference's values for one layer; see "Isolated mode" in ``docs/engines.md``."""
        return read_tensors(self.folder / "in" / prompt["id"] / f"{layer}.safetensors")

    def put(self, mode: str, prompt: Mapping[str, Any], layer: int | str, taps: Taps) -> None:
        """Write the taps of one layer: float32, int32 or int64 ids, uint8 codes; axis 0 as ``job.json`` says."""
        write_tensors(self.out / mode / prompt["id"] / f"{layer}.safetensors", taps)

    def finish(self, **about: Any) -> None:
        """Say that all is written, and what gave it: ``device``, ``version``, ``batched_prefill``, ``exercised``."""
        self.out.mkdir(parents=True, exist_ok=True)
        manifest = {"schema": SCHEMA, "job": self.content["id"], **about}
        (self.out / "manifest.json").write_text(json.dumps(manifest, indent=1))


def serve(
    job: Job,
    run_layer: RunLayer | None = None,
    run: Run | None = None,
    run_batch: RunBatch | None = None,
    **about: Any,
) -> None:
    """Do a job.

    Parameters
    ----------
    job : Job
    run_layer : callable or None
        ``(layer, inputs, choices) -> taps`` on the reference's inputs; None: not in isolated mode.
    run : callable or None
        ``(prompt, put)``: run the prompt's tokens freely and call ``put(layer, taps)`` for each layer.
    run_batch : callable or None
        ``prompts -> logits``: prefill several prompts as one batch, if the engine can; of each its logits at the
        judged rows below ``prompt_tokens``. Name the entry point: ``batched_prefill="engine.prefill"``.
    about : see :meth:`Job.finish`.
    """
    for number, (prompt, layer) in enumerate(job.layers("isolated"), start=1):
        if run_layer is None:
            break
        inputs = job.inputs(prompt, layer)
        choices = {name: inputs.pop(name) for name in CHOICES if name in inputs}
        job.put("isolated", prompt, layer, run_layer(layer, inputs, choices))
        print(f"isolated: {prompt['id']}, layer {layer} ({number})", file=sys.stderr, flush=True)
    for prompt in job.content["prompts"] if "compounded" in job.content["modes"] else ():
        if run is None:
            break
        run(prompt, lambda layer, taps, prompt=prompt: job.put("compounded", prompt, layer, taps))
        print(f"compounded: {prompt['id']}", file=sys.stderr, flush=True)
    batch = [prompt for prompt in job.content["prompts"] if prompt["id"] in job.content["batch"]]
    for prompt, logits in zip(batch, run_batch(batch) if run_batch and batch else (), strict=False):
        job.put("batched", prompt, MODEL, {"logits": logits})
    job.finish(**about)
