"""Where a function's local values are read: one that is only narrowed next is read once."""

import ast
from collections import defaultdict

from dsv4.casts.ops import VIEWS
from dsv4.casts.source import Module
from dsv4.casts.values import Place

Definition = tuple[int, int]  # line and column of the name that is bound
Definitions = frozenset[Definition]


class Uses:
    """Reads of each definition, by the node that reads.

    Attributes
    ----------
    casts : calls that are casts, and no views, whatever their name (``x.to(y)``).
    """

    def __init__(self) -> None:
        self.casts: set[ast.AST] = set()
        self.reads: defaultdict[Definition, dict[ast.AST, None]] = defaultdict(dict)
        self.from_views: dict[Definition, Definitions] = {}

    def once(self, definitions: Definitions) -> bool:
        """Whether each of these, and what it is a view of, is read at one place only."""
        for definition in definitions:
            before = self.from_views.get(definition, frozenset())
            if len(self.reads[definition]) > 1 or not self.once(before - {definition}):
                return False
        return True

    def is_view(self, node: ast.AST) -> bool:
        """Whether a call is a method that gives a view."""
        method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        return method and node.func.attr in VIEWS and node not in self.casts  # type: ignore[union-attr]


def written_at(node: ast.AST) -> int:
    """The line of an operation: a method's name may stand lines below the start of its chain."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.end_lineno or node.lineno
    return getattr(node, "lineno", 0)


def base(node: ast.expr, uses: Uses) -> ast.expr:
    """What an expression is a view of, itself if it is none."""
    while True:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and uses.is_view(node):
            node = node.func.value
        elif (isinstance(node, ast.Attribute) and node.attr in VIEWS) or isinstance(node, ast.Subscript):
            node = node.value
        else:
            return node


def consumer(module: Module, node: ast.AST, uses: Uses, depth: int = 0) -> Place | None:
    """What reads the value of ``node`` first, looking through views and one chain of names."""
    parents = module.parents
    parent = parents.get(node)
    while parent is not None:
        if isinstance(parent, ast.Attribute):
            call = parents.get(parent)
            called = isinstance(call, ast.Call) and call.func is parent
            if called and call and not uses.is_view(call):
                return _place(module, parent, f".{parent.attr}(…)")
            if not called and parent.attr not in VIEWS:
                return _place(module, parent, f".{parent.attr}")
            node = call if called and call else parent
        elif isinstance(parent, ast.Call):
            return _place(module, parent, f"{_name(parent.func)}(…)")
        elif isinstance(parent, ast.BinOp | ast.UnaryOp | ast.Compare | ast.AugAssign):
            return _place(module, parent, module.text(parent))
        elif isinstance(parent, ast.Return | ast.Yield):
            return _place(module, parent, "return")
        elif isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            return _named(module, parent, uses, depth)
        elif isinstance(parent, ast.stmt | ast.Lambda):
            return _place(module, parent, module.text(parent))
        else:  # a subscript, a starred argument, a keyword, a tuple, a dict, a choice
            node = parent
        parent = parents.get(node)
    return None


def _named(module: Module, parent: ast.AST, uses: Uses, depth: int) -> Place | None:
    target = parent.targets[0] if isinstance(parent, ast.Assign) else getattr(parent, "target", None)
    if isinstance(target, ast.Name) and depth < 4:
        reads = uses.reads.get((target.lineno, target.col_offset), {})
        first = min(reads, key=lambda node: (node.lineno, node.col_offset), default=None)  # type: ignore[attr-defined]
        if first is not None:
            return consumer(module, first, uses, depth + 1)
    return _place(module, parent, module.text(target) if target is not None else "")


def _place(module: Module, node: ast.AST, said: str) -> Place:
    line = node.end_lineno if isinstance(node, ast.Attribute) else written_at(node)
    return Place(module.file, line or 0, said)


def _name(node: ast.expr) -> str:
    said = ast.unparse(node)
    return said if len(said) < 60 else f"…{said.rpartition('.')[2]}"
