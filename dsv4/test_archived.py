"""No variant may run an archived file: refused by name, with the chain."""

from dataclasses import replace
from pathlib import Path

import pytest

from dsv4 import archived
from dsv4.code_inputs import KERNELS
from dsv4.config import ConfigError, load

CONFIG = load(Path(__file__).resolve().parent.parent / "config.yaml")
OLD = "dsv4/kernels/indexer/*.cu"
LOADER = """from pathlib import Path


def load(name):
    return (Path(__file__).parent / f"{name}.cu").read_text()
"""
TREE = {
    "dsv4/run/variant.py": "import dsv4.model.index\n",
    "dsv4/model/index.py": "",
    "dsv4/kernels/indexer/loader.py": LOADER,
    "dsv4/kernels/indexer/topk.cu": "",
    "dsv4/kernels/indexer/new/topk.cu": "",
}
USE = "\nfrom dsv4.kernels.indexer.loader import load\nload('topk')\n"
CHAIN = "dsv4/kernels/indexer/loader.py:5 -> dsv4/kernels/indexer/topk.cu"


@pytest.fixture
def check(tmp_path):
    """Check a tree with these changes."""

    def run(globs=(OLD,), backend="ref", **changes):
        files = TREE | {name.replace("__", "/") + ".py": text for name, text in changes.items()}
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        archived.check(replace(CONFIG, archived=tuple(globs)), backend, tmp_path)

    return run


def test_a_tree_that_reaches_none_is_let_through(check):
    check()


def test_a_glob_without_files_is_let_through(check):
    check(globs=["nowhere/*.cu"], dsv4__model__index=USE)


def test_a_loaded_file_is_refused_with_its_chain(check):
    with pytest.raises(ConfigError) as caught:
        check(dsv4__model__index=USE)
    assert str(caught.value) == (
        f"{CONFIG.path}: archived: {OLD}: every variant reaches dsv4/kernels/indexer/topk.cu: "
        f"dsv4/run/variant.py:1 -> dsv4/model/index.py:2 -> {CHAIN};"
        " cut the chain, or take the file out of `archived`"
    )


def test_only_the_variants_that_run_it_are_named(check):
    record = {
        "dsv4__model__index": "import kernels.formats.aligned_record",
        "kernels__formats__aligned_record": USE,
    }
    with pytest.raises(ConfigError, match=f"{OLD.replace('*', '.')}: B1_aligned reaches .*{CHAIN}"):
        check(**record)


def test_kernels_do_not_run_on_refs(check):
    start = KERNELS.replace(".", "__")
    kernels = {"dsv4__model__index": f"def run():\n    import {KERNELS}", start: USE}
    check(**kernels)
    with pytest.raises(ConfigError, match="every variant reaches"):
        check(backend="kernel", **kernels)


def test_a_name_that_only_a_run_knows_is_not_refused_but_shown(check, tmp_path):
    check(dsv4__model__index="import sys\nfrom dsv4.kernels.indexer.loader import load\nload(sys.argv[1])\n")
    config = replace(CONFIG, archived=(OLD,))
    found = archived.met(config, archived.Search(tmp_path, [archived.ENTRY]), "ref")
    assert {each.rank.name for each in found[OLD]["B1"]} == {"MAYBE"}
