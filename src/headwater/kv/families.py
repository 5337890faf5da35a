"""The families of one tier, by small numbers, with what each of them takes. Bounded: the number of a family without
blocks is given to the next one when all are taken."""

from collections.abc import Iterator, Sequence

from headwater.kv.block import Family

MAX_FAMILIES = 4096


class Families:
    """Numbers are stable while a family has blocks."""

    def __init__(self, families: Sequence[Family] = ()) -> None:
        self._families = list(families[:MAX_FAMILIES])
        self._numbers = {family: number for number, family in enumerate(self._families)}
        self._blocks = [0] * len(self._families)
        self._bytes = [0] * len(self._families)

    def __len__(self) -> int:
        return len(self._families)

    def __getitem__(self, number: int) -> Family:
        return self._families[number]

    def __iter__(self) -> Iterator[Family]:
        return iter(self._families)

    def find(self, family: Family) -> int:
        """Its number, or -1."""
        return self._numbers.get(family, -1)

    def number(self, family: Family) -> int:
        """Its number, given now if need be; -1 if all numbers are in use."""
        known = self._numbers.get(family)
        if known is not None:
            return known
        if len(self._families) < MAX_FAMILIES:
            number = len(self._families)
            self._families.append(family)
            self._blocks.append(0)
            self._bytes.append(0)
        else:
            number = next((n for n, blocks in enumerate(self._blocks) if not blocks), -1)
            if number < 0:
                return -1
            del self._numbers[self._families[number]]
            self._families[number] = family
        self._numbers[family] = number
        return number

    def charge(self, number: int, num_blocks: int, num_bytes: int) -> None:
        """Negative to give back. Blocks being written count: their number must not change hands."""
        self._blocks[number] += num_blocks
        self._bytes[number] += num_bytes

    def beside(self) -> set[int]:
        """Those of whose blocks nobody is told."""
        return {number for number, family in enumerate(self._families) if family.beside}

    def matching(self, tenant: str | None, model: str | None) -> set[int]:
        return {number for number, family in enumerate(self._families) if family.matches(tenant, model)}

    def usage(self) -> Iterator[tuple[Family, int, int]]:
        """(family, blocks, bytes) of those that have any."""
        for family, blocks, num_bytes in zip(self._families, self._blocks, self._bytes, strict=True):
            if blocks:
                yield family, blocks, num_bytes
