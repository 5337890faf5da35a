"""The port of structured output. A constraint is a function of the output tokens: it can be rebuilt from them."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headwater.protocol.request import StructuredSpec


class DeadEndError(Exception):
    """The output does not follow the constraint, or nothing can follow it any more."""


class TokenConstraint(Protocol):
    """The constraint on one sequence."""

    num_tokens: int
    """Output tokens taken in so far."""

    complete: bool
    """Whether nothing but an end token may follow."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in the next output tokens. Raises `DeadEndError`."""
        ...

    def mask(self, logits: NDArray[np.float32]) -> None:
        """Set the logits of all tokens that may not follow to -inf. Raises `DeadEndError` when none may."""
        ...


class ConstraintCompiler(Protocol):
    """Compiles specifications against one model's tokenizer. May be called from several threads."""

    def prepare(self, spec: StructuredSpec) -> None:
        """Do what takes long in `compile` and keep it for a while. Raises `InvalidRequest` like that."""
        ...

    def compile(self, spec: StructuredSpec) -> TokenConstraint:
        """A constraint at its start. Raises `InvalidRequest` naming the field and what is wrong with it."""
        ...
