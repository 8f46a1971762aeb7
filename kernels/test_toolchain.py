"""Which assembler is taken, and where a build says that it came from."""

import pytest

from kernels import toolchain


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A system's ptxas 13.0, no wheel, and nothing named by the user."""
    path = tmp_path / "ptxas"
    path.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    path.chmod(0o755)
    for name in toolchain.VARIABLES:
        monkeypatch.setenv(name, "")  # so that what select() sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(toolchain, "_wheel", lambda: None)
    monkeypatch.setattr(toolchain, "_system", lambda: path)
    return path


def test_both_families_say_the_source_that_was_found(own):
    found = [toolchain.select(), toolchain.select(blackwell=True)]
    assert [(one.version, one.source) for one in found] == [("13.0.88", "system")] * 2


def test_another_one_that_the_user_names_is_the_environment_s(own, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.write_text(own.read_text())
    other.chmod(0o755)
    monkeypatch.setenv(toolchain.VARIABLES[1], str(other))
    assert toolchain.select(blackwell=True).source == "environment"
    assert toolchain.select().source == "system"
