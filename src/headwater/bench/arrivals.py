"""When requests are sent: closed loop, Poisson, or at the times of a trace."""

from collections.abc import Iterable, Iterator
from random import Random
from typing import Protocol

from headwater.bench.workload import LoadRequest


class Arrivals(Protocol):
    max_in_flight: int | None
    """Requests in flight at most; None: as many as arrive."""

    def schedule(self, requests: Iterable[LoadRequest]) -> Iterator[tuple[float, LoadRequest]]:
        """Each request with the earliest second, counted from the start, at which it may be sent."""
        ...


class ClosedLoop:
    """`concurrency` users, each sending its next request when the last one is answered."""

    def __init__(self, concurrency: int) -> None:
        self.max_in_flight: int | None = concurrency

    def schedule(self, requests: Iterable[LoadRequest]) -> Iterator[tuple[float, LoadRequest]]:
        for request in requests:
            yield 0.0, request


class Poisson:
    """Independent users: exponential gaps with mean 1 / rate."""

    def __init__(self, rate_per_s: float, seed: int, max_in_flight: int | None = None) -> None:
        self.rate_per_s = rate_per_s
        self.seed = seed
        self.max_in_flight = max_in_flight

    def schedule(self, requests: Iterable[LoadRequest]) -> Iterator[tuple[float, LoadRequest]]:
        random = Random(f"{self.seed}/arrivals")
        at_s = 0.0
        for request in requests:
            yield at_s, request
            at_s += random.expovariate(self.rate_per_s)


class TraceTimes:
    """The times written in the requests."""

    def __init__(self, max_in_flight: int | None = None) -> None:
        self.max_in_flight = max_in_flight

    def schedule(self, requests: Iterable[LoadRequest]) -> Iterator[tuple[float, LoadRequest]]:
        for request in requests:
            yield request.at_s or 0.0, request
