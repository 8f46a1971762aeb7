"""Which code files a stage runs: Snakemake sees no Python import, so the rules list them as inputs.

A stage's files are the closure of its module's imports below ``dsv4/`` and ``kernels/``, read from
the source without importing it: imports at any depth, modules named by a string (``python -m
dsv4.run.aba``), and data files named by a string beside the module (``page.html.j2``).
"""

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

from dsv4.closure.names import module_file
from dsv4.source_names import Kept, may_be_file, may_be_module, names_module

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dsv4", "kernels")
KEPT = Path(".snakemake/source_names.json")  # below ROOT: what sources name, see dsv4.source_names

# Files that run only where the plan says so, as file -> {field: values}: an edit reruns just the variants
# with one of these values, and not the references. A file that is not listed concerns every variant.
ONLY_WHERE: dict[str, Mapping[str, tuple[str, ...]]] = {
    "kernels/formats/aligned_record.py": {"kv_record": ("aligned",)},
    "kernels/formats/fp8_scaled.py": {"index_score": ("einsum_fp32", "fp8")},
    "kernels/formats/nvfp4_record.py": {"kv_format": ("nvfp4",)},
}


# The same for kernels, where variants run on them; only what no other kernel takes a function or constant from.
KERNEL_ONLY_WHERE: dict[str, Mapping[str, tuple[str, ...]]] = {
    "kernels/gather_dequantise/kernel.py": {"kv_read": ("gather_bf16",)},
    "kernels/gather_dequantise/nvfp4_kernel.py": {"kv_format": ("nvfp4",)},
    "kernels/gather_dequantise/row_kernel.py": {"kv_read": ("gather_bf16",)},
    "kernels/kv_norm_rope_store/kernel.py": {"kv_norm": ("fused",)},
    "kernels/kv_store/nvfp4_kernel.py": {"kv_format": ("nvfp4",)},
    "kernels/mhc_rmsnorm_quantise_nvfp4/kernel.py": {"mhc_quant": ("fused",)},
    "kernels/sparse_attn/bf16_kernel.py": {"q_format": ("bf16",)},
    "kernels/sparse_attn/fp8_kernel.py": {"q_format": ("fp8", "fp8x2")},
    "kernels/sparse_attn/gathered_hopper_kernel.py": {"kv_read": ("gather_bf16",)},
    "kernels/sparse_attn/hopper_kernel.py": {"q_format": ("fp8", "fp8x2")},
    "kernels/sparse_attn/hopper_query_kernel.py": {"q_format": ("fp8",)},
    "kernels/sparse_attn/product.py": {"q_format": ("fp8", "fp8x2")},
}
KERNELS = "dsv4.backend.start"  # the one module through which kernels are reached
COMMITS = "dsv4.commits.rung"  # the one through which a rung runs on a commit's code


def closure(module: str, without: Collection[str] = (), root: Path | None = None) -> tuple[str, ...]:
    """Files that ``python -m module`` can run, relative to the repository, sorted.

    Parameters
    ----------
    without : modules that are not followed, nor what only they need.
    root : the repository; None: this one.

    Raises
    ------
    ModuleNotFoundError
        ``module`` is no file there.
    """
    root = root or ROOT
    if _module_file(module, root) is None:
        raise ModuleNotFoundError(f"{module}: no such module below {root}")
    names, files = _run_as_main(module, root), set[str]()
    seen = set(names)
    while names:
        found = _needs(names.pop(), root)
        files.update(found.files)
        new = found.modules - seen - set(without)
        seen |= new
        names += new
    _kept(ROOT).write()
    return tuple(sorted(files))


def variant_code(
    module: str, plan: Mapping[str, str], backend: str = "ref", *, commit: bool = False
) -> tuple[str, ...]:
    """Return the closure without the files that only other plans run (:data:`ONLY_WHERE`, and that of kernels).

    Parameters
    ----------
    module : the stage.
    plan : ``dsv4.plan.flatten`` of the variant's plan; empty for the references.
    backend : "kernel": the files of kernels too; references, floors and noise are always "ref".
    commit : the files too that run a commit's code.
    """
    left = elsewhere(plan, backend)
    without = {KERNELS: backend != "kernel", COMMITS: not commit}
    files = closure(module, [name for name, left_out in without.items() if left_out])
    return tuple(file for file in files if file not in left)


def elsewhere(plan: Mapping[str, str], backend: str) -> frozenset[str]:
    """Files that a variant does not run, though its stage imports them: those of other plans, and of kernels."""
    named = ONLY_WHERE | KERNEL_ONLY_WHERE
    others = {
        file
        for file, fields in named.items()
        if not any(plan.get(field) in values for field, values in fields.items())
    }
    return frozenset(others if backend == "kernel" else others | {f"{KERNELS.replace('.', '/')}.py"})


class _Needs:
    """What one module needs: other modules of ours, and files (itself among them)."""

    def __init__(self, modules: set[str], files: set[str]) -> None:
        self.modules = modules
        self.files = files


@cache
def _kept(root: Path) -> Kept:
    return Kept(root / KEPT)


@cache
def _needs(module: str, root: Path) -> _Needs:
    path = _module_file(module, root)
    assert path is not None
    modules, files = set[str](), {_relative(path, root)}
    parent = module
    while "." in parent:  # importing a.b.c runs a/__init__.py and a/b/__init__.py
        parent = parent.rpartition(".")[0]
        modules.add(parent)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    named = _kept(ROOT).names(path.read_bytes(), package, PACKAGES, str(path))
    modules.update(named.imports)
    for text in named.strings:
        if names_module(text, PACKAGES):
            modules.update(_run_as_main(text, root))
        files.update(_data(path.parent, text, root))
    return _Needs({name for name in modules if _module_file(name, root) is not None}, files)


def _run_as_main(module: str, root: Path) -> list[str]:
    """What ``python -m module`` starts with: the module, and a package's ``__main__``."""
    return [name for name in (module, f"{module}.__main__") if _module_file(name, root) is not None]


def _data(folder: Path, name: str, root: Path) -> Iterator[str]:
    path = folder / name
    if may_be_file(name) and path.is_file() and root in path.resolve().parents:
        yield _relative(path.resolve(), root)


@cache
def _module_file(module: str, root: Path) -> Path | None:
    """Source of a module of the repository, or None."""
    if not may_be_module(module, PACKAGES):
        return None
    return module_file(root.joinpath(*module.split(".")))


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()
