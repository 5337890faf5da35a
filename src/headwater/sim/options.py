"""What `headwater advise` compares: layouts of a server's GPUs into workers, and what each worker does.

A layout is written `4xTP1+2xTP2`; with roles, `4xTP1P+2xTP2D`: P prefills, D decodes, neither does both.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from headwater.errors import ConfigError
from headwater.planner.plan import RolePlan, candidates
from headwater.planner.pool import WorkerModel
from headwater.types import Role

_PART = re.compile(r"(\d{1,4})xTP(\d{1,2})([PD]?)")
_ROLES: dict[str, Role] = {"": "both", "P": "prefill", "D": "decode"}
_LETTERS = {role: letter for letter, role in _ROLES.items()}
MAX_WORKERS = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensor-parallel size of every worker, ascending; 0 where it does not matter."""

    sizes: tuple[int, ...]

    @property
    def num_gpus(self) -> int:
        return sum(self.sizes)

    @property
    def names(self) -> list[str]:
        """Of the workers' classes."""
        return [_class_name(size) for size in self.sizes]

    def __str__(self) -> str:
        return "+".join(f"{self.sizes.count(size)}x{_class_name(size)}" for size in sorted(set(self.sizes)))

    def pool(self, models: Mapping[int, WorkerModel]) -> list[WorkerModel]:
        return [models[size] for size in self.sizes]

    def options(self) -> Iterator["Option"]:
        """All-aggregated and every split."""
        for plan in candidates(self.names):
            yield Option(self, plan)


@dataclass(frozen=True, slots=True)
class Option:
    """A layout with roles, fixed."""

    layout: Layout
    plan: RolePlan

    @property
    def aggregated(self) -> bool:
        return self.plan.aggregated

    def __str__(self) -> str:
        workers = list(zip(self.layout.sizes, self.plan.roles, strict=True))
        order = ("prefill", "both", "decode")
        groups = sorted(set(workers), key=lambda group: (order.index(group[1]), group[0]))
        return "+".join(f"{workers.count(group)}x{_class_name(group[0])}{_LETTERS[group[1]]}" for group in groups)

    @classmethod
    def parse(cls, written: str) -> Self:
        """Raises `ConfigError` for what is not written so, or has a phase that nobody does."""
        workers: list[tuple[int, Role]] = []
        for part in written.split("+"):
            matched = _PART.fullmatch(part)
            if matched is None:
                raise ConfigError(f"no workers are written {part!r}", hint="for example 4xTP1P+1xTP4D or 8xTP1")
            count, size, letter = matched.groups()
            workers += [(int(size), _ROLES[letter])] * min(int(count), MAX_WORKERS + 1)
        workers.sort(key=lambda worker: (worker[0], ("prefill", "both", "decode").index(worker[1])))
        plan = RolePlan(tuple(role for _, role in workers))
        if len(workers) > MAX_WORKERS or not plan.complete:
            raise ConfigError(f"{written}: from 1 to {MAX_WORKERS} workers, of which some prefill and some decode")
        return cls(Layout(tuple(size for size, _ in workers)), plan)


def _class_name(size: int) -> str:
    return f"TP{size}" if size else "worker"


def layouts(num_gpus: int, sizes: Sequence[int]) -> list[Layout]:
    """Workers of one size, and of two sizes, that use all GPUs."""
    found = [Layout((size,) * (num_gpus // size)) for size in sizes if num_gpus % size == 0]
    for small in sizes:
        for large in sizes:
            if large <= small:
                continue
            for count in range(1, num_gpus // large + 1):
                rest = num_gpus - count * large
                if rest > 0 and rest % small == 0:
                    found.append(Layout((small,) * (rest // small) + (large,) * count))
    return [layout for layout in found if len(layout.sizes) <= MAX_WORKERS]
