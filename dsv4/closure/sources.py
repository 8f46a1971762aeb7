"""Kernel sources: files that calls name, text that is compiled from a string, and what they include."""

import ast
import posixpath
import re

from dsv4.closure.findings import Findings, Kind
from dsv4.closure.module import Condition, Placed
from dsv4.closure.program import Program
from dsv4.closure.texts import HOLE
from dsv4.closure.tree import KERNEL_SUFFIXES

FROM_FILES = {"load", "CUDAExtension", "CppExtension", "SYCLExtension", "Extension", "load_library"}
FROM_TEXT = {"load_inline", "RawModule", "RawKernel", "SourceModule", "nvrtcCreateProgram", "compile_source"}
LIBRARIES = {"CDLL", "PyDLL", "LoadLibrary", "load_library", "cdll"}
SAYS_NOTHING = {
    "print",
    "exists",
    "is_file",
    "debug",
    "info",
    "warning",
    "error",
    "endswith",
    "startswith",
    "ValueError",
}
# What these make of a name is read by the call that gets it.
BUILD_PATHS = {
    "join",
    "joinpath",
    "Path",
    "PurePath",
    "str",
    "fspath",
    "abspath",
    "realpath",
    "normpath",
    "resolve",
}
BUILD_PATHS |= {"with_name", "with_suffix", "dirname", "basename", "format", "replace"}
INCLUDE_WORDS = {"extra_include_paths", "include_dirs", "include_paths"}
FLAG_WORDS = {"extra_cflags", "extra_cuda_cflags", "extra_compile_args", "options", "nvcc_options"}
KERNEL_TEXT = re.compile(
    r"__global__|__device__|#\s*include\s*[<\"]|extern\s+\"C\"|torch::Tensor|at::Tensor|__kernel\b"
)
INCLUDE = re.compile(
    r"^[ \t]*#[ \t]*(?:include|include_next|import)[ \t]*(?:\"([^\"\n]+)\"|<([^>\n]+)>|([A-Za-z_]\w*))", re.M
)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.S)


def call(program: Program, placed: Placed, findings: Findings) -> None:
    """Add the kernel files that a call is given, and the folders that their includes are looked for in."""
    node, scope = placed.node, placed.scope
    assert isinstance(node, ast.Call)
    parts = program.evaluator.dotted(node.func, scope)
    name = parts[-1] if parts else node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if name in SAYS_NOTHING | BUILD_PATHS:
        return
    receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    for part in (*receiver, *node.args, *(word.value for word in node.keywords)):
        for text in program.evaluator.values(part, scope):
            given(program, text, node.lineno, name, placed.condition, findings)
    for text in program.evaluator.values(node, scope) if name in ("glob", "rglob", "iglob") else ():
        given(program, text, node.lineno, name, placed.condition, findings)
    _folders(program, placed, findings)
    _loader(program, placed, name, parts, findings)


def given(program: Program, text: str, line: int, how: str, condition: Condition, findings: Findings) -> None:
    """A text that a call is given: a kernel file's path, perhaps with holes."""
    if posixpath.splitext(text)[1] not in KERNEL_SUFFIXES or "\n" in text or len(text) > 400:
        return
    if HOLE in text:
        literal = posixpath.splitext(text)[0].replace(HOLE, "").strip("/.")
        findings.note(
            Kind.UNKNOWN,
            line,
            f"{how or 'call'} of {_shown(program, text)}" + ("" if literal else ": any file"),
        )
        for file in program.tree.paths(text) if literal else ():
            findings.refer(file, line, how or "call", condition, maybe=True)
        return
    files = resolve(program, text, findings.file)
    for file in files:
        findings.refer(file, line, how or "call", condition, maybe=len(files) > 1)


def resolve(program: Program, text: str, file: str) -> list[str]:
    """Files that a path in ``file`` may mean: from the root, beside the file, or the files that end in it."""
    tree = program.tree
    for place in (text, f"{posixpath.dirname(file)}/{text}"):
        inside = tree.relative(place)
        if inside is not None and tree.is_file(inside):
            return [inside]
    return [] if text.startswith("/") else tree.ending(text)


def _shown(program: Program, text: str) -> str:
    return text.replace(f"{program.tree.root}/", "").replace(HOLE, "*")


def _folders(program: Program, placed: Placed, findings: Findings) -> None:
    node = placed.node
    assert isinstance(node, ast.Call)
    for word in node.keywords:
        if word.arg in INCLUDE_WORDS | FLAG_WORDS:
            for text in program.evaluator.values(word.value, placed.scope):
                folder = text if word.arg in INCLUDE_WORDS else text[2:] if text.startswith("-I") else None
                if folder is None or HOLE in folder:
                    continue
                for place in (folder, f"{posixpath.dirname(findings.file)}/{folder}"):
                    inside = program.tree.relative(place)
                    if inside is not None and (program.tree.root / inside).is_dir():
                        findings.includes.append(inside)


def _loader(program: Program, placed: Placed, name: str, parts: tuple[str, ...], findings: Findings) -> None:
    """Loaders by name: compiled text is listed, a library or sources that cannot be read are unknown."""
    node, scope = placed.node, placed.scope
    assert isinstance(node, ast.Call)
    line = node.lineno
    named = {word.arg: word.value for word in node.keywords}
    if name in LIBRARIES:
        for text in program.evaluator.values(node.args[0] if node.args else named.get("name"), scope) or (
            HOLE,
        ):
            _library(program, text, line, name, findings)
    elif name in FROM_TEXT:
        sources = [
            value for word, value in named.items() if word and ("source" in word or word in ("code", "src"))
        ]
        sources = sources or (
            [] if "path" in named else node.args[1:] if name == "load_inline" else node.args[:1]
        )
        for source in sources:
            for text in program.evaluator.values(source, scope):
                if not text.endswith(tuple(KERNEL_SUFFIXES)):
                    embedded(program, text, line, name, placed.condition, findings)
    elif name in FROM_FILES and (name != "load" or "cpp_extension" in parts):
        sources = named.get("sources") or (node.args[1] if len(node.args) > 1 else None)
        if sources is not None and HOLE in program.evaluator.values(sources, scope):
            findings.note(Kind.UNKNOWN, line, f"{name}: sources are named at run time")
        for text in program.evaluator.values(sources, scope) if sources is not None else ():
            if HOLE not in text and not resolve(program, text, findings.file):
                findings.note(Kind.BROKEN, line, f"{name}: no file {_shown(program, text)}")


def _library(program: Program, text: str, line: int, how: str, findings: Findings) -> None:
    """A compiled library: of the system if it is only named, else built from sources that no import tells."""
    if posixpath.splitext(text)[1] in KERNEL_SUFFIXES:
        return
    stem = posixpath.basename(text).split(".")[0].removeprefix("lib")
    files = program.tree.files if HOLE not in stem else ()
    alike = sorted(
        file for file in files if _is_kernel(file) and posixpath.basename(file).split(".")[0] == stem
    )
    if "/" in text or HOLE in text or alike or how == "load_library":
        guess = f", perhaps {', '.join(alike)}" if alike else ""
        shown = _shown(program, text)
        findings.note(Kind.UNKNOWN, line, f"{how} of {shown}: its sources are not named here{guess}")
    else:
        findings.note(Kind.EXTERNAL, line, text)


def _is_kernel(file: str) -> bool:
    return posixpath.splitext(file)[1] in KERNEL_SUFFIXES


def string(program: Program, text: str, line: int, condition: Condition, findings: Findings) -> None:
    """Add kernel source in a string, and a file that a string outside a call names."""
    if "\n" in text and KERNEL_TEXT.search(text):
        embedded(program, text, line, "string", condition, findings)
    elif posixpath.splitext(text)[1] in KERNEL_SUFFIXES and 3 < len(text) < 200:
        files = resolve(program, text, findings.file)
        if len(files) == 1:  # of several, the path that it is a part of tells which
            findings.refer(files[0], line, "named by a string", condition, maybe=True)


def embedded(
    program: Program, text: str, line: int, how: str, condition: Condition, findings: Findings
) -> None:
    """List kernel source in a string, and follow what it includes."""
    if text == HOLE:
        findings.note(Kind.UNKNOWN, line, f"{how}: source text is built at run time")
        return
    findings.note(Kind.EMBEDDED, line, f"{how}: {len(text.splitlines())} lines of source")
    included(program, text, findings, line, condition)


def read(program: Program, file: str) -> Findings:
    """Read a kernel file's includes."""
    findings = Findings(file)
    text = (program.tree.root / file).read_text(encoding="utf-8", errors="replace")
    included(program, text, findings, None, Condition())
    return findings


def included(program: Program, text: str, findings: Findings, line: int | None, condition: Condition) -> None:
    """Follow ``#include``; of text in a string all stand on its ``line``."""
    folder = posixpath.dirname(findings.file)
    bare = COMMENT.sub(_blank, text)
    for match in INCLUDE.finditer(bare):
        quoted, angled, macro = match.groups()
        at = line or bare.count("\n", 0, match.start()) + 1 + match.group().count(
            "\n", 0, match.group().index("#")
        )
        if macro:
            findings.note(Kind.UNKNOWN, at, f"#include {macro}: a macro names the file")
            continue
        folders = ([folder] if quoted else []) + list(program.includes)
        places = (program.tree.relative(f"{place or '.'}/{quoted or angled}") for place in folders)
        hit = next((place for place in places if place is not None and program.tree.is_file(place)), None)
        if hit is not None:
            findings.refer(hit, at, "#include", condition)
            continue
        ending = program.tree.ending(quoted) if quoted else []
        for file in ending:  # an include folder that a build file gives
            findings.refer(file, at, "#include", condition, maybe=True)
        if not ending:
            findings.note(Kind.EXTERNAL, at, f"#include {quoted or angled}")


def _blank(match: re.Match[str]) -> str:
    """Comments vanish, lines and strings stay."""
    return match.group() if match.group()[0] in "\"'" else re.sub(r"[^\n]", " ", match.group())
