"""Role plans as data: what each worker of a pool does, and which plans are worth trying.

`both` everywhere is the aggregated cluster. A split gives every worker one phase. A loose plan lets the price of one
request leave its split: decode workers may prefill what is cheaper there, prefill workers may keep what they computed.

Workers that are alike are exchangeable, so that of each class only numbers matter: of a class of n workers, the first
ones by place prefill. Prefill for others is done by workers of role `prefill` only, and these hold no room for
others: what waits for room waits for computation, never the other way round, so no circle of reservations can form.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from headwater.types import Role


@dataclass(frozen=True, slots=True)
class RolePlan:
    """What every worker of a pool does, in the pool's order."""

    roles: tuple[Role, ...]
    loose: bool = False
    """Whether a request may leave the plan where that is cheaper for all."""

    @property
    def aggregated(self) -> bool:
        return all(role == "both" for role in self.roles)

    def describe(self, names: Sequence[str] = ()) -> str:
        """In words: `2 x TP1 prefill + 1 x TP2 decode`."""
        if self.aggregated:
            return f"{len(self.roles)} aggregated"
        counted: dict[tuple[str, str], int] = {}
        for number, role in enumerate(self.roles):
            key = (role, names[number] if names else "")
            counted[key] = counted.get(key, 0) + 1
        order: tuple[Role, ...] = ("prefill", "both", "decode")
        parts = [
            f"{count} {f'{name} ' if name else ''}{role}"
            for wanted in order
            for (role, name), count in counted.items()
            if role == wanted
        ]
        return " + ".join(parts) + (" (loose)" if self.loose else "")


def aggregated(num_workers: int) -> RolePlan:
    both: Role = "both"
    return RolePlan((both,) * num_workers)


def candidates(classes: Sequence[str]) -> Iterator[RolePlan]:
    """All-aggregated, then every split into prefill and decode, for workers of these classes."""
    yield aggregated(len(classes))
    names = list(dict.fromkeys(classes))
    sizes = [classes.count(name) for name in names]
    for counts in product(*[range(size + 1) for size in sizes]):
        if 0 < sum(counts) < len(classes):
            yield _split(classes, dict(zip(names, counts, strict=True)))


def _split(classes: Sequence[str], num_prefill: dict[str, int]) -> RolePlan:
    left = dict(num_prefill)
    roles: list[Role] = []
    for name in classes:
        roles.append("prefill" if left[name] > 0 else "decode")
        left[name] -= 1
    return RolePlan(tuple(roles))


def loosened(plan: RolePlan) -> RolePlan | None:
    """The same roles, left where the price says so; None where there is nothing to leave."""
    return None if plan.aggregated or plan.loose else RolePlan(plan.roles, loose=True)
