"""Compiled modules that ``setup.py`` builds: importing one runs its sources."""

import ast

from dsv4.closure import sources
from dsv4.closure.findings import Findings
from dsv4.closure.module import spelled
from dsv4.closure.program import Program

SETUP = "setup.py"
BUILDERS = {"CUDAExtension", "CppExtension", "SYCLExtension", "Extension"}


def built(program: Program, module: str) -> Findings:
    """What ``setup.py`` says of a compiled module: its sources, and where they look for includes."""
    findings = Findings(SETUP)
    setup = program.module(SETUP) if SETUP in program.tree.files else None
    for placed in setup.placed if setup else ():
        node = placed.node
        if isinstance(node, ast.Call) and spelled(node.func).rpartition(".")[2] in BUILDERS:
            given = dict(zip(("name", "sources"), node.args, strict=False)) | {
                w.arg: w.value for w in node.keywords
            }
            if module in program.evaluator.values(given.get("name"), placed.scope):
                sources.call(program, placed, findings)
    return findings
