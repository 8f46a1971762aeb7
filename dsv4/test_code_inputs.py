"""The files that a stage runs, read from the sources."""

import importlib
import inspect
import subprocess
import sys

import pytest
import torch

from dsv4 import code_inputs
from dsv4.code_inputs import KERNEL_ONLY_WHERE, ONLY_WHERE, ROOT, closure, variant_code
from dsv4.model import numerics
from dsv4.model.random_model import random_weights, small_config
from dsv4.model.transformer import Transformer
from dsv4.plan import choices, unflatten


@pytest.fixture
def tree(tmp_path, monkeypatch):
    files = {
        "dsv4/__init__.py": "",
        "dsv4/__main__.py": "import dsv4.other",
        "dsv4/a.py": "from dsv4 import b\nimport kernels.op.ref as r\nimport os",
        "dsv4/b.py": "def f():\n    from .deep.c import x",
        "dsv4/deep/__init__.py": "from ..d import y",
        "dsv4/deep/c.py": "x = 'table.json'",
        "dsv4/deep/table.json": "{}",
        "dsv4/d.py": "run = ['python', '-m', 'dsv4.e']\ny = 'dsv4.nothing', 'dsv4'",
        "dsv4/e.py": "",
        "dsv4/other.py": "",
        "kernels/__init__.py": "",
        "kernels/op/__init__.py": "",
        "kernels/op/ref.py": "",
        "kernels/op/kernel.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(code_inputs, "ROOT", tmp_path)
    code_inputs._needs.cache_clear()
    code_inputs._module_file.cache_clear()
    yield set(files)
    code_inputs._needs.cache_clear()
    code_inputs._module_file.cache_clear()


def test_what_runs_commits_is_no_code_of_a_variant():
    files = variant_code("dsv4.run.variant", {})
    assert not [file for file in files if file.startswith("dsv4/commits/")]
    assert "dsv4/commits/rung.py" in variant_code("dsv4.run.variant", {}, commit=True)


@pytest.mark.parametrize("backend", ["ref", "kernel"])
@pytest.mark.parametrize("stage", ["variant", "floor", "reference", "checkpoint"])
def test_an_edit_of_what_judges_reruns_nothing_that_is_judged(stage, backend):
    files = variant_code(f"dsv4.run.{stage}", {}, backend)
    assert [file for file in files if file.startswith("dsv4/judge/")] == []


def test_imports_strings_and_data_files_are_followed(tree):
    assert set(closure("dsv4.a")) == tree - {"dsv4/__main__.py", "dsv4/other.py", "kernels/op/kernel.py"}
    assert closure("dsv4") == ("dsv4/__init__.py", "dsv4/__main__.py", "dsv4/other.py")
    assert set(closure("dsv4.deep.c")) == {
        "dsv4/__init__.py",
        "dsv4/d.py",
        "dsv4/deep/__init__.py",
        "dsv4/deep/c.py",
        "dsv4/deep/table.json",
        "dsv4/e.py",
    }


def test_a_module_that_is_not_there_is_named(tree):
    with pytest.raises(ModuleNotFoundError, match=r"dsv4\.nothing"):
        closure("dsv4.nothing")


def test_the_closure_holds_whatever_python_imports():
    code = "import sys, dsv4.prompts; print(*sorted(m for m in sys.modules if m.startswith(('dsv4', 'kernels'))))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {
        path.replace("/__init__.py", "").removesuffix(".py").replace("/", ".")
        for path in closure("dsv4.prompts")
    }
    assert set(done.stdout.split()) <= files


def test_files_of_other_plans_are_left_out(monkeypatch, tree):
    monkeypatch.setattr(code_inputs, "ONLY_WHERE", {"kernels/op/ref.py": {"q_format": ("fp8", "fp8x2")}})
    assert "kernels/op/ref.py" in variant_code("dsv4.a", {"q_format": "fp8"})
    for plan in ({}, {"q_format": "bf16"}):
        assert set(closure("dsv4.a")) - set(variant_code("dsv4.a", plan)) == {"kernels/op/ref.py"}


@pytest.fixture(scope="module")
def small_model():
    config = small_config()
    return config, random_weights(config, 0), torch.arange(40) % config.vocab_size


def poison(monkeypatch, file):
    """Let every function of a file fail."""
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))

    def fail(*_args, **_kwargs):
        raise RuntimeError(f"{file} was run")

    own = [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__]
    for holder in (module, *own):
        for name, value in list(vars(holder).items()):
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                monkeypatch.setattr(holder, name, fail)


@pytest.mark.parametrize("file", ONLY_WHERE)
def test_a_file_of_some_plans_runs_in_these_and_in_no_other(monkeypatch, small_model, file):
    config, weights, tokens = small_model
    ((field, values),) = ONLY_WHERE[file].items()
    poison(monkeypatch, file)

    def runs(rounding):
        model = Transformer(config, weights, rounding)
        try:
            model.forward([model.new_cache()], [tokens])
        except RuntimeError as error:
            return str(error) == f"{file} was run"
        return False

    assert not runs(numerics.plain(config))
    assert not runs(numerics.trained(config))
    for value in choices()[field]:
        plan = unflatten({field: value})
        assert runs(numerics.of_plan(plan, config)) == (value in values), value


def test_the_table_names_real_files_fields_and_values():
    for file, fields in (ONLY_WHERE | KERNEL_ONLY_WHERE).items():
        assert (ROOT / file).is_file(), file
        for field, values in fields.items():
            assert set(values) < set(choices()[field]), (file, field)


def test_kernels_are_inputs_of_variants_on_kernels_alone():
    on_refs = variant_code("dsv4.run.variant", {"q_format": "fp8"})
    on_kernels = variant_code("dsv4.run.variant", {"q_format": "fp8"}, "kernel")
    more = set(on_kernels) - set(on_refs)
    assert "kernels/sparse_attn/ref.py" in on_refs
    assert not [file for file in on_refs if file.endswith("kernel.py")]
    assert {"dsv4/backend/stages.py", "kernels/linear/kernel.py", "kernels/sparse_attn/fp8_kernel.py"} <= more
    assert "kernels/sparse_attn/bf16_kernel.py" not in more
    assert "kernels/rmsnorm/kernel.py" not in variant_code("dsv4.run.reference", {})
