"""Which ptxas assembles the kernels: CUDA 13.0's from PyPI where it is, else the one inside Triton, and it is said.

ptxas 12.8 and 12.9, bundled with Triton 3.6 to 3.9, miscompile an FP8 cast down and up again in one kernel (half of
the residuals are wrong); 13.0 does not. So both a build and a process that launches kernels call :func:`select`
before the first compilation. And which compute-sanitizer looks at what they do.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

Source = Literal["wheel", "system", "environment", "bundled"]

VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")  # Triton has one for each family
RIGHT = (13, 0)  # first release that compiles FP8 round trips right


@dataclass(frozen=True, kw_only=True)
class Ptxas:
    """The assembler in use.

    Attributes
    ----------
    version : such as ``"13.0.88"``.
    source : ``"wheel"`` (nvidia-cuda-nvcc), ``"system"`` (on the path), ``"environment"`` (named by the user), or
        ``"bundled"`` (Triton's).
    trusted : whether the version compiles FP8 round trips right.
    """

    version: str
    source: Source
    trusted: bool

    def __str__(self) -> str:
        return (
            f"ptxas {self.version} ({self.source}{'' if self.trusted else ', miscompiles FP8 round trips'})"
        )

    def record(self) -> dict[str, object]:
        """Fields for a JSON file."""
        return asdict(self)


def select(*, blackwell: bool = False) -> Ptxas:
    """Point Triton at the best ptxas that there is, for this process and its children.

    Parameters
    ----------
    blackwell : whether the kernels are for sm_100 and above, for which Triton bundles another ptxas.
    """
    variable = VARIABLES[blackwell]
    found: tuple[tuple[Path | None, Source], ...] = ((_wheel(), "wheel"), (_system(), "system"))
    if named := os.environ.get(variable):  # by the user, or by an earlier call for the other family
        known: list[Source] = [source for path, source in found if _same(named, path)]
        return _describe(Path(named), known[0] if known else "environment")
    for path, source in found:
        if path is not None and _number(_version(path)) >= RIGHT:
            for name in VARIABLES:
                os.environ.setdefault(name, str(path))
            return _describe(path, source)
    return _describe(tool("ptxas-blackwell" if blackwell else "ptxas"), "bundled")


def tool(name: str) -> Path:
    """A CUDA tool that Triton brings: ``ptxas``, ``nvdisasm``, ``cuobjdump``.

    Raises
    ------
    FileNotFoundError
        This Triton has none.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"no triton, so no {name} of its own")
    path = Path(spec.submodule_search_locations[0]) / "backends" / "nvidia" / "bin" / name
    if not path.is_file():
        raise FileNotFoundError(f"this triton brings no {name}")
    return path


def _describe(path: Path, source: Source) -> Ptxas:
    version = _version(path)
    return Ptxas(version=version, source=source, trusted=_number(version) >= RIGHT)


@cache
def _version(path: Path) -> str:
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+(?:\.\d+)+)", said)
    if found is None:
        raise ValueError(f"ptxas does not tell its version: {said[-200:]!r}")
    return found[1]


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def sanitizer() -> Path | None:
    """compute-sanitizer of the wheel ``nvidia-cuda-sanitizer-api`` where it is installed, else the one on the path.

    Newer ones report fewer correct programs; which was used is in docs/races.md.
    """
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    return _of_wheel("compute-sanitizer/compute-sanitizer") or (Path(found) if found else None)


def sanitizer_year() -> int:
    """Year of :func:`sanitizer`'s version, 2025 of 2025.3.1; 0 without one or where it does not say."""
    path = sanitizer()
    said = path and subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Version (\d{4})\.", said or "")
    return int(found[1]) if found else 0


def _wheel() -> Path | None:
    """Return the ptxas of nvidia-cuda-nvcc 13."""
    return _of_wheel("bin/ptxas")


def _of_wheel(name: str) -> Path | None:
    """Return a program of NVIDIA's wheels for CUDA 13, which share the namespace ``nvidia.cu13``."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "cu13" / name
        if path.is_file() and os.access(path, os.X_OK):
            return path
    return None


def _system() -> Path | None:
    found = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    return Path(found) if found else None


def _same(name: str, path: Path | None) -> bool:
    return path is not None and Path(name).resolve() == path.resolve()
