"""Isolated mode: the reference on its own inputs is the reference; a change shows where it acts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsv4.dump import DumpReader
from dsv4.faults import FAULTS
from dsv4.model import numerics
from dsv4.plan import Plan
from dsv4.run.isolated import Reference, run_isolated
from dsv4.run.modes import first_streams, run_both_modes
from dsv4.run.trace import Trace, tap_names
from dsv4.taps import BY_NAME, MODEL, PHASES

pytestmark = pytest.mark.xdist_group("nano")
_references: dict[Path, Reference] = {}  # as in floors, one is read by many runs


def dumped(setup, prompt):
    return DumpReader(setup.results / "reference" / f"{prompt}.h5", setup.identity(prompt))


def isolated(setup, prompt, model, wrap=lambda seen: seen):
    config, path = setup.checkpoint.config, setup.results / "reference" / f"{prompt}.h5"
    if path not in _references:
        _references[path] = Reference(dumped(setup, prompt), config)
    reference = _references[path]
    trace = Trace(config, reference.rows, tap_names(config, "isolated"))
    run_isolated(model, reference, first_streams(setup, reference), wrap(trace.at))
    return trace


@pytest.mark.parametrize("prompt", ["short", "long"])
def test_reference_on_its_own_inputs_is_itself(nano_audit, prompt):
    config = nano_audit.checkpoint.config
    trace = isolated(nano_audit, prompt, nano_audit.model(numerics.trained(config)))
    with dumped(nano_audit, prompt) as dump:
        for layer, name in trace.taps():
            phases = [phase for phase in PHASES if dump.has("compounded", phase, layer, name)]
            truth = np.concatenate([dump.get("compounded", phase, layer, name) for phase in phases])
            values = trace.get(layer, name)[1]
            if BY_NAME[name].kind == "ids":
                values = values.astype(np.int32)
            np.testing.assert_array_equal(values, truth, err_msg=f"{prompt} layer {layer} {name}")


def test_free_run_of_the_reference_is_the_reference(nano_audit):
    model = nano_audit.model(numerics.trained(nano_audit.checkpoint.config))
    _, compounded, _ = run_both_modes(nano_audit, model)
    for prompt, trace in compounded.items():
        with dumped(nano_audit, prompt) as dump:
            truth = np.concatenate([dump.get("compounded", phase, MODEL, "logits") for phase in PHASES])
            np.testing.assert_array_equal(trace.get(MODEL, "logits")[1], truth)


@pytest.fixture(scope="module")
def clean(nano_audit):
    """Return the long prompt's trace without a fault."""
    return isolated(
        nano_audit, "long", nano_audit.model(numerics.of_plan(Plan(), nano_audit.checkpoint.config))
    )


@pytest.mark.parametrize("name", FAULTS)
def test_fault_shows_first_at_its_own_stage(nano_audit, clean, name):
    fault, config = FAULTS[name], nano_audit.checkpoint.config
    model = nano_audit.model(numerics.of_plan(Plan(), config))
    faulty = isolated(nano_audit, "long", model, fault.install(model))
    changed = [
        (layer, tap)
        for layer, tap in clean.taps()
        if not np.array_equal(clean.get(layer, tap)[1], faulty.get(layer, tap)[1], equal_nan=True)
    ]
    assert changed, f"{fault.what}: nothing changed"
    assert changed[0][0] == fault.layer
    assert BY_NAME[changed[0][1]].stage == fault.stage
    assert {layer for layer, _ in changed} == {fault.layer}


def test_replaced_values_hide_what_came_before(nano_audit):
    """A gain in layer 3's norm output is seen there and in what stores it, not in layer 4."""
    config = nano_audit.checkpoint.config
    fault = replace(FAULTS["norm_gain"], layer=0)
    model = nano_audit.model(numerics.trained(config))
    trace = isolated(nano_audit, "short", model, fault.install(model))
    with dumped(nano_audit, "short") as dump:
        q = np.concatenate([dump.get("compounded", phase, 0, "q") for phase in PHASES])
        attn_in = np.concatenate([dump.get("compounded", phase, 0, "attn_in") for phase in PHASES])
    np.testing.assert_array_equal(trace.get(0, "q")[1], q)
    np.testing.assert_allclose(trace.get(0, "attn_in")[1], 1.05 * attn_in, rtol=1e-6)
