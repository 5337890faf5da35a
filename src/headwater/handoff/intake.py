"""One hand-off as the decode worker sees it: events in, actions out.

    asked: blocks are announced and read in order, one read at a time, all that is known at once
      all read and the first token known -> Complete
      anything fails -> (the read under way ends) -> FallBack with what has arrived
      the engine ends the load -> (the read under way ends) -> Stop

Exactly one of Complete, FallBack and Stop comes, with Release beside it, and no Read or Arrived after it. None of them
comes while a read is under way.
"""

from dataclasses import dataclass

from headwater.errors import HeadwaterError, ProtocolError
from headwater.scheduler.outside import FirstToken


@dataclass(frozen=True, slots=True)
class Read:
    """Move blocks of the sequence here; answered with `read` or `read_failed`."""

    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class CancelRead:
    """It is answered all the same."""


@dataclass(frozen=True, slots=True)
class Arrived:
    num_blocks: int
    """From the start of the sequence on."""


@dataclass(frozen=True, slots=True)
class Complete:
    first: FirstToken


@dataclass(frozen=True, slots=True)
class FallBack:
    num_blocks: int
    reason: HeadwaterError


@dataclass(frozen=True, slots=True)
class Stop:
    """Nothing is written any more."""


@dataclass(frozen=True, slots=True)
class Release:
    """The prefill worker may forget the sequence."""


Action = Read | CancelRead | Arrived | Complete | FallBack | Stop | Release


class Intake:
    """Blocks are counted from the start of the sequence: those before `first_block` are here already."""

    def __init__(self, first_block: int, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._announced = first_block
        self._arrived = first_block
        self._reading = 0
        """Blocks of the read under way."""
        self._first: FirstToken | None = None
        self._failure: HeadwaterError | None = None
        self._unwanted = False
        self.closed = False

    def announced(self, first_block: int, num_blocks: int) -> list[Action]:
        """The prefill worker says that blocks can be read."""
        end = first_block + num_blocks
        if first_block != self._announced or num_blocks < 1 or end > self._num_blocks:
            return self.failed(
                ProtocolError(
                    f"blocks {first_block} to {end} were announced where those from {self._announced} "
                    f"to at most {self._num_blocks} were to come"
                )
            )
        self._announced = end
        return self._advance()

    def token(self, first: FirstToken) -> list[Action]:
        """The prefill worker has finished: all blocks are announced."""
        if self._announced < self._num_blocks:
            return self.failed(
                ProtocolError(f"the first token came with {self._announced} of {self._num_blocks} blocks announced")
            )
        self._first = first
        return self._advance()

    def read(self) -> list[Action]:
        """The read under way is done."""
        arrived, self._reading = self._reading, 0
        if not arrived:
            return []
        if self._failure is not None or self._unwanted:
            return self._advance()
        self._arrived += arrived
        return [Arrived(self._arrived), *self._advance()]

    def read_failed(self, error: HeadwaterError) -> list[Action]:
        self._reading = 0
        return self.failed(error)

    def failed(self, error: HeadwaterError) -> list[Action]:
        """The hand-off cannot go on: refused, lost, too slow, damaged."""
        if self.closed or self._failure is not None:
            return self._advance()
        self._failure = error
        return [*self._cancelled(), *self._advance()]

    def ended(self) -> list[Action]:
        """The engine does not want the blocks any more."""
        if self.closed or self._unwanted:
            return []
        self._unwanted = True
        return [*self._cancelled(), *self._advance()]

    def _cancelled(self) -> list[Action]:
        return [CancelRead()] if self._reading else []

    def _advance(self) -> list[Action]:
        if self.closed or self._reading:
            return []
        if self._unwanted:
            return self._close(Stop())
        if self._failure is not None:
            return self._close(FallBack(self._arrived, self._failure))
        if self._announced > self._arrived:
            self._reading = self._announced - self._arrived
            return [Read(self._arrived, self._reading)]
        if self._first is not None:
            return self._close(Complete(self._first))
        return []

    def _close(self, last: Action) -> list[Action]:
        self.closed = True
        return [last, Release()]
