"""Finding model weights and the texts beside them. Importing this needs neither torch nor numpy."""

from headwater.weights.base import ModelKind, ResolvedModel
from headwater.weights.resolve import resolve

__all__ = ["ModelKind", "ResolvedModel", "resolve"]
