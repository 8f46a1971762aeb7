"""The floor is tested on the small audit of nano."""

from dsv4.run.conftest import _one_thread

__all__ = ["_one_thread"]
