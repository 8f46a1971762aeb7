"""Read and check ``config.yaml``, and name the run that it describes.

Everything that can be refused before a job runs is refused here, with the file, the key, the
value and what to do. Imports no torch: the rules load this at every start.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from dsv4.commit_options import Commits, CommitsError, overridden, parse_commits
from dsv4.device import Backend, NoDeviceError, resolve
from dsv4.engine.spec import Engine, EngineError, ForeignReference, parse_engine, parse_reference
from dsv4.ladder import Ladder, LadderError
from dsv4.schema import ConfigError, read_yaml

HASH_WHOLE = 256 * 2**20  # bytes; of larger files samples are hashed, so that a start stays cheap
SAMPLES, SAMPLE = 64, 64 * 2**10  # blocks a large file, bytes a block
CHECKPOINT_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
FETCH = "fetch the checkpoint again, or correct `checkpoint` in config.yaml"


class CheckpointError(ConfigError):
    """A checkpoint that cannot be audited; the message names file, key and value."""


@dataclass(frozen=True, kw_only=True)
class ForeignBuild:
    """How the audited tree is built, if it is not this one: a bash command, its folder, globs of its lock files."""

    command: str
    folder: Path
    locks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Config:
    """A checked ``config.yaml``.

    Attributes
    ----------
    path : the file it came from.
    checkpoint : folder in Hugging Face's layout; relative to the working directory.
    prompts : the prompt file.
    seed : of the floor's dither, the only random numbers of an audit.
    decode_steps : teacher-forced steps that are dumped and judged, a prompt.
    text_tokens : most tokens of a generated text, its stop id included.
    prefill_rows : prefill rows that are dumped, a prompt; the prompt's own ``rows`` come first.
    floor_draws : dithered draws of the noise floor.
    page_size : tokens a KV page.
    backend : what variants run on: "ref", "kernel", or "auto": kernels where there is a GPU.
    tighten : limit name -> value.
    ladder : the rungs.
    build : the audited tree's own build, or None.
    archived : globs of files that no variant may reach, below the tree's root.
    engines : name -> an engine that rungs may run on.
    reference : who gives a reference once more, to be compared with ours, or None.
    commits : which commits are judged as variants.
    """

    path: Path
    checkpoint: Path
    prompts: Path
    seed: int
    decode_steps: int
    prefill_rows: int
    floor_draws: int
    page_size: int
    tighten: Mapping[str, float]
    ladder: Ladder
    build: ForeignBuild | None = None
    engines: Mapping[str, Engine] = field(default_factory=dict)
    reference: ForeignReference | None = None
    commits: Commits = field(default_factory=Commits)
    backend: str = "auto"
    archived: tuple[str, ...] = ()
    text_tokens: int = 576


def load(path: str | Path) -> Config:
    """Read and check a configuration; its ladder is checked too, its checkpoint is not touched.

    Raises
    ------
    ConfigError
        See :func:`dsv4.schema.read_yaml`; an engine that :func:`dsv4.engine.spec.parse_engine` or a ladder that
        :class:`dsv4.ladder.Ladder` refuses.
    """
    path = Path(path)
    content = read_yaml(path, "config")
    try:
        engines = {name: parse_engine(name, each) for name, each in content.get("engines", {}).items()}
        reference = parse_reference(content.get("reference"))
        ladder = Ladder(content["ladder"], engines)
        commits = parse_commits(content.get("commits", {}), [rung.id for rung in ladder], engines)
    except (CommitsError, EngineError, LadderError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return Config(
        path=path,
        checkpoint=Path(content["checkpoint"]),
        prompts=Path(content["prompts"]),
        seed=content["seed"],
        decode_steps=content["decode_steps"],
        prefill_rows=content["prefill_rows"],
        floor_draws=content["floor_draws"],
        page_size=content["page_size"],
        tighten=dict(content.get("tighten") or {}),
        ladder=ladder,
        build=_foreign_build(content.get("build")),
        backend=content.get("backend", "auto"),
        archived=tuple(content.get("archived") or ()),
        text_tokens=content.get("text_tokens", Config.text_tokens),
        engines=engines,
        reference=reference,
        commits=commits,
    )


def with_options(config: Config, options: Mapping[str, Any]) -> Config:
    """The configuration with what was given as ``--config base=main head=my-branch``.

    Raises
    ------
    ConfigError
        See :func:`dsv4.commit_options.overridden`.
    """
    try:
        commits = overridden(config.commits, options, [rung.id for rung in config.ladder])
    except CommitsError as error:
        raise ConfigError(str(error)) from error
    return replace(config, commits=commits)


def _foreign_build(content: Mapping[str, Any] | None) -> ForeignBuild | None:
    if content is None:
        return None
    locks = tuple(content.get("locks", ()))
    return ForeignBuild(command=content["command"], folder=Path(content["folder"]), locks=locks)


def model_config(checkpoint: Path) -> dict[str, Any]:
    """Parse the checkpoint's ``config.json``.

    Raises
    ------
    CheckpointError
        The folder or the file is missing, or it is no JSON object.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"checkpoint = {checkpoint}: no such folder; config.yaml names one in Hugging Face's layout"
        )
    return json_object(checkpoint / "config.json")


def json_object(file: Path) -> dict[str, Any]:
    """Parse a file of the checkpoint that holds one JSON object.

    Raises
    ------
    CheckpointError
        It is missing or unreadable, or holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: missing; {FETCH}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: no valid JSON ({error}); {FETCH}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds {type(content).__name__}, not an object of keys; {FETCH}")
    return content


def weight_files(checkpoint: Path) -> list[Path]:
    """Return the checkpoint's safetensors files: those that the index names, or the only one.

    Raises
    ------
    CheckpointError
        There are none, or the index names a shard that is not there.
    """
    index = checkpoint / "model.safetensors.index.json"
    names = _shards(index) if index.is_file() else ["model.safetensors"]
    missing = [str(checkpoint / name) for name in names if not (checkpoint / name).is_file()]
    if missing:
        source = f", named by {index.name}" if index.is_file() else ""
        raise CheckpointError(f"{', '.join(missing)}: missing{source}; {FETCH}")
    return [checkpoint / name for name in names]


def _shards(index: Path) -> list[str]:
    """Names of the files that hold the tensors."""
    weight_map = json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map = {weight_map!r} names no shards; {FETCH}")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{index}: weight_map.{tensor} = {shard!r} is no file's name; {FETCH}")
    return sorted(set(weight_map.values()))


def checkpoint_files(checkpoint: Path) -> list[Path]:
    """Return every file of the checkpoint that an audit reads, in a fixed order."""
    small = [checkpoint / name for name in CHECKPOINT_FILES if (checkpoint / name).is_file()]
    index = checkpoint / "model.safetensors.index.json"
    return small + ([index] if index.is_file() else []) + weight_files(checkpoint)


def checkpoint_sha256(checkpoint: Path) -> str:
    """Hash the checkpoint: whole files, but size, header and samples of those over ``HASH_WHOLE``.

    Samples show other weights; they need not show a few changed bytes. Those are seen by the hashes
    of whole files in ``checkpoint.json``, which :mod:`dsv4.run.checkpoint` writes once a file has
    changed.
    """
    files = tuple(checkpoint_files(checkpoint))
    stamps = tuple((path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    return _hash_files(files, stamps)


@cache
def _hash_files(files: tuple[Path, ...], stamps: tuple[tuple[int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, (size, _) in zip(files, stamps, strict=True):
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= HASH_WHOLE:
                while block := file.read(2**20):
                    digest.update(block)
            else:
                for block in _samples(file, size):
                    digest.update(block)
    return digest.hexdigest()


def _samples(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Header of a large safetensors file, then blocks at equal distances up to its end."""
    prefix = file.read(8)  # the JSON header's length
    yield prefix + file.read(min(int.from_bytes(prefix, "little"), HASH_WHOLE))
    start = file.tell()
    for sample in range(SAMPLES):
        file.seek(start + sample * max(size - SAMPLE - start, 0) // (SAMPLES - 1))
        yield file.read(SAMPLE)


def run_id(config: Config) -> str:
    """Name the run: model folder, checkpoint, prompt set and the device of kernels; the folder under ``results/``.

    Raises
    ------
    ConfigError
        ``backend: kernel`` where no kernel can run.
    """
    name = re.sub(r"[^\w.-]", "_", config.checkpoint.resolve().name)
    checkpoint, prompts = checkpoint_sha256(config.checkpoint), prompt_set_sha256(config)
    return f"{name}-{checkpoint[:8]}-{prompts[:8]}{backend_of(config).suffix}"


def prompt_set_sha256(config: Config) -> str:
    """Hash of the prompts with taps and their settings, not of the file's layout and comments.

    A prompt that is only continued is no part of it: what was judged by taps stays, and texts alone are made anew.
    """
    prompts = [entry for entry in read_yaml(config.prompts, "prompts") if entry.get("use") != "text"]
    entries = [{key: value for key, value in entry.items() if key != "use"} for entry in prompts]
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def backend_of(config: Config) -> Backend:
    """What this configuration's variants run on, on this machine.

    Raises
    ------
    ConfigError
        ``backend: kernel`` where no kernel can run.
    """
    try:
        return resolve(config.backend)
    except NoDeviceError as error:
        raise ConfigError(f"{config.path}: {error}") from error
