"""Snakemake files: what they include, the Python that their shell commands and scripts start, their imports."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from dsv4.closure import imports
from dsv4.closure.dynamic import Dynamic
from dsv4.closure.findings import Findings
from dsv4.closure.module import Condition, Placed, parse
from dsv4.closure.program import Program
from dsv4.closure.texts import HOLE

IMPORT = re.compile(r"^[ \t]*((?:import|from)[ \t]+[\w.]+.*)$", re.M)
KEYWORD = re.compile(r"^[ \t]*(include|script|snakefile)[ \t]*:", re.M)


def read(program: Program, file: str) -> Findings:
    """Read one file. Its language is Python with more statements, so that only its tokens are looked at."""
    findings = Findings(file)
    text = (program.tree.root / file).read_text(encoding="utf-8", errors="replace")
    dynamic = Dynamic(program, findings)
    for match in IMPORT.finditer(text):
        _import(program, match.group(1), text.count("\n", 0, match.start(1)) + 1, findings)
    folder = file.rpartition("/")[0]
    for line, keyword, string in _strings(text):
        if keyword in ("include", "snakefile", "script"):
            target = program.tree.relative(f"{folder}/{string}" if folder else string)
            if program.tree.is_file(target):
                findings.refer(str(target), line, keyword, Condition(), main=keyword == "script")
        else:
            dynamic.shell(re.sub(r"\{[^{}]*\}", HOLE, string), line, Condition())
    return findings


def _import(program: Program, text: str, line: int, findings: Findings) -> None:
    try:
        module = parse(findings.file, "\n" * (line - 1) + text)
    except SyntaxError:
        return
    for placed in module.placed:
        if isinstance(placed.node, ast.Import | ast.ImportFrom):
            imports.read(program, module, Placed(placed.node, placed.scope, placed.condition), findings)


def _strings(text: str) -> Iterator[tuple[int, str, str]]:
    """Strings with their lines and the keyword before them; what stands side by side is one."""
    keyword, parts, start = "", list[str](), 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.STRING:
                start = start if parts else token.start[0]
                parts.append(_value(token.string))
            elif token.type in (tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE, tokenize.INDENT):
                continue
            else:
                if parts:
                    yield start, keyword, "".join(parts)
                    parts = []
                keyword = (
                    token.string if token.type == tokenize.NAME else keyword if token.string == ":" else ""
                )
    except (tokenize.TokenError, SyntaxError):
        return


def _value(string: str) -> str:
    try:
        value = ast.literal_eval(string.lstrip("fF"))
    except (ValueError, SyntaxError):
        return ""
    return value if isinstance(value, str) else ""
