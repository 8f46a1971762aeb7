"""What following one function asks of those that know the tree and keep the casts: :mod:`dsv4.casts.engine` answers."""

import ast
from collections.abc import Sequence
from typing import Any, Protocol

from dsv4.casts.forms import Form
from dsv4.casts.source import Module
from dsv4.casts.values import Dtype, Instance, Value


class Keeps(Protocol):
    """Takes casts as they are met; ``body`` is the function that is followed."""

    def cast(self, body: Any, node: ast.Call, form: Form, value: Value) -> None:
        """A cast was met."""

    def quantiser(self, body: Any, node: ast.Call, value: Value) -> None:
        """A call that stores its first argument in a narrow format."""

    def choice(self, body: Any, node: ast.AST, dtype: Dtype) -> None:
        """A producer's dtype is chosen here."""


class Knows(Protocol):
    """Answers what a function alone does not tell."""

    @property
    def recorder(self) -> Keeps:
        """Where casts go."""
        ...

    def annotated(self, argument: ast.arg, module: Module) -> Value:
        """What a parameter's annotation says."""

    def global_value(self, module: Module, name: str) -> Value:
        """A name that no function of the file binds."""

    def global_of(self, module: Module, dotted: str) -> Value:
        """A global of another file of the tree."""

    def attribute(self, instance: Instance, name: str) -> Value:
        """An attribute of an object of the tree."""

    def set_attribute(self, module: Module, owner: str, name: str, value: Value) -> None:
        """``self.name = value`` in a method of ``owner``."""

    def of_key(self, module: Module, name: str) -> Value:
        """What dicts of the swept files hold under this key."""

    def under_keys(self, module: Module, names: Sequence[object], values: Sequence[Value]) -> None:
        """A dict is made."""

    def called(
        self, body: Any, node: ast.Call, dotted: str, positional: list[Value], given: dict[str, Value]
    ) -> Any:
        """What a function of the tree returns; NotImplemented where it is not one of the tree."""
