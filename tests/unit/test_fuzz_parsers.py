"""Every parser of bytes from outside, for a moment: noise, and honest inputs with a few bytes changed."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz_targets import TARGETS

SLOW = {"template": 25, "gguf": 60, "safetensors": 60, "kv_disk_manifest": 30, "kv_disk_index": 60}


@pytest.mark.parametrize("name", TARGETS)
def test_honest_inputs_pass(name: str) -> None:
    for seed in TARGETS[name].seeds:
        TARGETS[name].run(seed)


@pytest.mark.parametrize("name", TARGETS)
def test_noise_and_changed_inputs_raise_nothing_unexpected(name: str) -> None:
    target = TARGETS[name]

    @settings(max_examples=SLOW.get(name, 150), deadline=None, database=None)
    @given(st.binary(max_size=200), st.sampled_from(target.seeds), st.randoms(use_true_random=False))
    def run(noise: bytes, seed: bytes, rng: random.Random) -> None:
        target.run(noise)
        target.run(changed(seed, rng))

    run()


def changed(seed: bytes, rng: random.Random) -> bytes:
    data = bytearray(seed)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[at:at] = bytes((rng.randrange(256),)) * rng.choice((1, 1, 8, 300))
            case 1:
                del data[at : at + rng.randint(1, 8)]
            case 2:
                data[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7, b"99999999"))
            case 3:
                data[at : at + 1] = bytes((rng.randrange(256),))
            case _:
                piece = bytes(data[at : at + rng.randint(1, 32)])
                data[at:at] = piece * rng.choice((1, 50))
    return bytes(data)
