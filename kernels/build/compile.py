"""One Build -> PTX, cubin and facts, in one of the processes of ``workers.py``."""

import contextlib
import io
import json
import os
import time
from pathlib import Path
from typing import Any

from kernels.build.architecture import Architecture
from kernels.build.evidence import describe
from kernels.build.sharing import FIRST, Kept, resumed
from kernels.build_spec import Build

POINTER_ALIGNMENT = 16  # bytes; Triton specialises on divisibility by 16


class BuildError(ValueError):
    """A Build that does not fit its kernel: which, and what is wrong."""


def source(build: Build) -> Any:
    """Triton's (or Gluon's) source object.

    Raises
    ------
    BuildError
        Arguments that the kernel does not have, or that the Build leaves out; or something that is no kernel.
    """
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    kernel = build.kernel
    if not isinstance(kernel, JITFunction):
        raise BuildError(f"{build.name}: {type(kernel).__name__} is no @triton.jit or @gluon.jit function")
    given = {**build.signature, **build.constants}
    names = kernel.arg_names
    wrong = {
        "left out": [n for n in names if n not in given],
        "unknown": [n for n in given if n not in names],
    }
    wrong["given twice"] = sorted(set(build.signature) & set(build.constants))
    wrong["aligned, but no argument"] = [n for n in build.aligned if n not in build.signature]
    for what, which in wrong.items():
        if which:
            raise BuildError(f"{build.name}: {what}: {', '.join(which)}")
    signature = {name: build.signature.get(name, "constexpr") for name in names}
    aligned: dict[Any, Any] = {
        (names.index(n),): [["tt.divisibility", POINTER_ALIGNMENT]] for n in build.aligned
    }
    kind: type = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        kind = GluonASTSource
    return kind(kernel, signature, dict(build.constants), aligned)


def compile_build(build: Build, arch: Architecture, stem: Path, kept: Kept) -> None:
    """Write ``stem`` + ``.ptx``, ``.cubin`` and ``.json``; Triton's own cache is a folder beside them.

    Parameters
    ----------
    kept : what this Build's compilations for other architectures left; what this one leaves is added.

    Raises
    ------
    BuildError
        See :func:`source`.
    """
    os.environ["TRITON_CACHE_DIR"] = str(
        stem.with_suffix(".triton")
    )  # what a dead process left is never reused
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True  # of a kernel out of a cache ptxas says nothing
    started = time.monotonic()
    said = io.StringIO()
    lowered = kept.fit(arch)
    target = GPUTarget("cuda", arch.capability, 32)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(said))
        kernel = source(build)
        if lowered:
            kernel = stack.enter_context(resumed(kernel, lowered, arch))
        made = triton.compile(kernel, target=target, options=dict(build.options))
    if not lowered:
        kept.add(arch, made, triton.__version__)
    compiled = time.monotonic() - started
    ptx, cubin = stem.with_suffix(".ptx"), stem.with_suffix(".cubin")
    ptx.write_text(made.asm["ptx"])
    cubin.write_bytes(made.asm["cubin"])
    facts = {
        "shared_bytes": made.metadata.shared,
        "tensor_memory_columns": getattr(made.metadata, "tmem_size", 0) or 0,
        "num_warps": made.metadata.num_warps,
        **describe(made.asm["ptx"], cubin, said.getvalue()),
        "compile_seconds": round(compiled, 2),
        "llvm_ir_of": FIRST if lowered else arch.name,
    }
    stem.with_suffix(".json").write_text(json.dumps(facts))
