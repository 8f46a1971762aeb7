"""What a compiled kernel shows of itself: its PTX, its SASS, and what ptxas said about it. Text in, facts out."""

import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernels.toolchain import tool

_PTX_TENSOR = re.compile(r"^\s*(?:@!?%p\d+\s+)?((?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)\S*)", re.M)
_SASS_TENSOR = re.compile(r"\b((?:[HQIO]G?MMA|UTC[A-Z]*MMA|DMMA)\b[.\w]*)")
# ptxas 12.8 and 12.9 read the stack pointer where a packed FP8 pair should be
_BAD_CAST = re.compile(r"\b(F2FP\.\w+\.E[45]M[23]\.UNPACK_B\w*\s+R\d+\S*,\s+R1(?:\.\w+)?)(?=\s|;|$)")
_UNPACK = re.compile(r"\bcvt\.[\w.]*f16x2\.e[45]m[23]x2\b")  # what becomes F2FP…UNPACK_B in SASS
F2FP = 0x23E  # low 12 bits of a conversion with register operands, sm_90 to sm_120
SOURCES = (24, 32, 64)  # bits at which an instruction names its source registers
STACK_POINTER = 1
_RESOURCES = {
    "registers": r"Used (\d+) registers",
    "stack_bytes": r"(\d+) bytes stack frame",
    "spill_store_bytes": r"(\d+) bytes spill stores",
    "spill_load_bytes": r"(\d+) bytes spill loads",
}


def tensor_instructions(ptx: str) -> dict[str, int]:
    """Tensor-core instructions in PTX and how often each stands there, by name."""
    return dict(sorted(Counter(_PTX_TENSOR.findall(ptx)).items()))


def sass_tensor_instructions(sass: str) -> dict[str, int]:
    """The same of SASS."""
    return dict(sorted(Counter(_SASS_TENSOR.findall(sass)).items()))


def miscompiled_casts(sass: str) -> list[str]:
    """FP8 conversions that read the stack pointer R1: the mark of the ptxas 12.8 and 12.9 fault."""
    return [" ".join(found.split()) for found in _BAD_CAST.findall(sass)]


def conversions(cubin: bytes) -> Iterator[int]:
    """Instructions of a cubin, as numbers of 128 bits, that convert registers to or from narrow formats.

    Far cheaper than the disassembler, which takes a third of a second to start. That it finds what that would is
    tested on every architecture that it knows.
    """
    table, size, count = (
        struct.unpack_from(kind, cubin, at)[0] for kind, at in (("<Q", 0x28), ("<H", 0x3A), ("<H", 0x3C))
    )
    for header in range(table, table + size * count, size):
        kind, flags, _, start, length = struct.unpack_from("<4xIQQQQ", cubin, header)
        if kind != 1 or not flags & 4:  # what the program defines and runs
            continue
        for low, high in struct.iter_unpack("<QQ", cubin[start : start + length // 16 * 16]):
            if low & 0xFFF == F2FP:
                yield low | high << 64


def may_read_stack_pointer(conversion: int) -> bool:
    """Whether an instruction names R1 as a source."""
    return any(conversion >> bit & 0xFF == STACK_POINTER for bit in SOURCES)


def resources(ptxas_log: str) -> dict[str, int]:
    """Registers a thread, stack and spilled bytes from ``ptxas -v``; 0 where it does not name one.

    Raises
    ------
    ValueError
        The log names no registers.
    """
    if "registers" not in ptxas_log:
        raise ValueError(f"ptxas named no registers: {ptxas_log[-300:]!r}")
    # several functions in one file each have a line; a kernel is as big as its biggest
    return {
        name: max((int(n) for n in re.findall(pattern, ptxas_log)), default=0)
        for name, pattern in _RESOURCES.items()
    }


def warnings(ptxas_log: str) -> list[str]:
    """Warnings and advisories of ptxas, such as wgmma that was serialised (C7510, C7512)."""
    lines = (line.strip() for line in ptxas_log.splitlines())
    wanted = re.compile(r"warning|advisory|serializ|\(C75\d\d\)", re.I)
    return sorted({re.sub(r"^ptxas\S* ", "", line)[:300] for line in lines if wanted.search(line)})


def disassemble(cubin: Path) -> tuple[str | None, str]:
    """SASS of a cubin, or None and why not: nvdisasm 12.8 does not know sm_103."""
    try:
        command = [
            tool("nvdisasm"),
            "-c",
            "-ndf",
            cubin,
        ]  # no data flow: nobody reads it, and it takes a quarter
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"no SASS: {error}"
    if ran.returncode or not ran.stdout.strip():
        said = re.search(r"Cannot decode architecture '(\w+)'", ran.stderr)
        return None, f"no SASS: nvdisasm {'does not know ' + said[1] if said else 'failed'}"
    return ran.stdout, ""


def describe(ptx: str, cubin: Path, ptxas_log: str) -> dict[str, Any]:
    """All of the above of one kernel, as fields of its JSON."""
    unpacks = _UNPACK.search(ptx)
    found = list(conversions(cubin.read_bytes())) if unpacks else []
    # an encoding that is not known shows no conversion at all: then the disassembler has to look
    suspect = bool(unpacks) and (not found or any(map(may_read_stack_pointer, found)))
    sass, why = disassemble(cubin) if suspect else (None, "")
    facts: dict[str, Any] = dict(resources(ptxas_log))
    facts["tensor_ptx"] = tensor_instructions(ptx)
    facts["tensor_sass"] = None if sass is None else sass_tensor_instructions(sass)
    facts["miscompiled_casts"] = miscompiled_casts(sass or "") if sass or not suspect else None
    facts["warnings"] = warnings(ptxas_log) + ([why] if why else [])
    return facts
