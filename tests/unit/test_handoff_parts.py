"""The pure parts of hand-offs: what follows from what, how long to wait, which blocks fit."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import TransferRefused, TransferTimeout
from headwater.handoff.intake import Action, Arrived, CancelRead, Complete, FallBack, Intake, Read, Release, Stop
from headwater.handoff.layout import check_layouts
from headwater.handoff.patience import MAX_HOLD_S, Pace, Patience, Progress, Prospects, patience
from headwater.handoff.wait import OwnWork, Wait
from headwater.protocol.cluster import ModelCard
from headwater.protocol.request import ExportOrder
from headwater.scheduler.outside import FirstToken

FIRST = FirstToken(7)
ERROR = TransferTimeout("too slow")


def test_reads_follow_announcements_and_the_token_completes() -> None:
    intake = Intake(2, 10)
    assert intake.announced(2, 3) == [Read(2, 3)]
    assert intake.announced(5, 2) == []
    assert intake.announced(7, 1) == []
    assert intake.read() == [Arrived(5), Read(5, 3)]
    assert intake.announced(8, 2) == []
    assert intake.token(FIRST) == []
    assert intake.read() == [Arrived(8), Read(8, 2)]
    assert intake.read() == [Arrived(10), Complete(FIRST), Release()]
    assert intake.closed
    assert intake.failed(ERROR) == intake.ended() == intake.read() == []


def test_what_has_arrived_is_kept_when_the_rest_fails() -> None:
    intake = Intake(0, 6)
    intake.announced(0, 2)
    assert intake.read() == [Arrived(2)]
    assert intake.announced(2, 2) == [Read(2, 2)]
    assert intake.failed(ERROR) == [CancelRead()]
    assert intake.read_failed(ERROR) == [FallBack(2, ERROR), Release()]


def test_a_peer_that_announces_nonsense_is_not_believed() -> None:
    for first, count in ((1, 2), (0, 7), (0, 0), (0, -1), (-1, 3)):
        (last, release) = Intake(0, 6).announced(first, count)
        assert isinstance(last, FallBack)
        assert release == Release()
    early = Intake(0, 6)
    early.announced(0, 5)
    assert early.token(FIRST) == [CancelRead()]
    assert isinstance(early.read()[0], FallBack)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(1, 12), first=st.integers(0, 3))
def test_every_hand_off_ends_once_and_never_under_a_read(seed: int, num_blocks: int, first: int) -> None:
    rng = random.Random(seed)
    end = first + num_blocks
    intake = Intake(first, end)
    announced, reading, arrived = first, False, first
    ends = 0

    def take(actions: list[Action]) -> None:
        nonlocal reading, arrived, ends
        for action in actions:
            assert not ends or isinstance(action, Release)
            match action:
                case Read(at, count):
                    assert not reading
                    assert (at, at + count) == (arrived, announced)
                    reading = True
                case CancelRead():
                    assert reading
                case Arrived(count):
                    assert count > arrived
                    arrived = count
                case Complete() | FallBack() | Stop():
                    assert not reading
                    ends += 1
                    assert not isinstance(action, Complete) or arrived == end
                    assert not isinstance(action, FallBack) or action.num_blocks == arrived

    for _ in range(40):
        event = rng.choice(["announce", "announce", "read", "read", "token", "broken", "ended", "read failed"])
        if event == "announce" and announced < end:
            count = rng.randint(1, end - announced)
            announced += count
            take(intake.announced(announced - count, count))
        elif event == "read" and reading:
            reading = False
            take(intake.read())
        elif event == "read failed" and reading and rng.random() < 0.2:
            reading = False
            take(intake.read_failed(ERROR))
        elif event == "token" and announced == end:
            take(intake.token(FIRST))
        elif event == "broken" and rng.random() < 0.1:
            take(intake.failed(ERROR))
        elif event == "ended" and rng.random() < 0.1:
            take(intake.ended())
    take(intake.ended())
    if reading:
        reading = False
        take(intake.read())
    assert ends == 1
    assert intake.closed


def test_patience_grows_with_what_was_expected_and_ends_before_the_blocks_do() -> None:
    short, long, unknown = patience(100, 500), patience(60_000, 100_000), patience(0, 100_000)
    assert short.total_s < long.total_s
    assert 0.1 < short.total_s < 5
    assert 60 < long.total_s < 300
    assert unknown.total_s > 60
    absurd = [patience(ms, tokens) for ms in (float("nan"), float("inf"), -1.0, 1e12, 3e6) for tokens in (10, 10**9)]
    for one in (short, long, unknown, *absurd):
        assert 0 < one.stall_s <= one.total_s < one.hold_s <= MAX_HOLD_S


def test_time_in_line_does_not_count_but_is_bounded() -> None:
    asked = patience(1000, 2000)
    assert asked.in_line(0.5, 1.2).total_s == pytest.approx(0.5 + asked.total_s)
    assert asked.in_line(5.0, 1.2).stall_s == asked.stall_s
    assert asked.in_line(5.0, asked.stall_s + 1).stall_s == asked.stall_s + 1, "steps take long there"
    assert asked.in_line(5.0, 100.0).stall_s <= asked.in_line(5.0, 100.0).total_s
    for at_s in (0.0, 30.0, 100.0, 1e6):
        limit = asked.in_line(at_s, 1.0)
        assert asked.total_s <= limit.total_s <= asked.longest_s < asked.hold_s == limit.hold_s


def test_a_line_is_left_for_a_price_or_a_deadline_and_never_for_what_nobody_knows() -> None:
    assert Prospects(there_s=20, here_s=2).better_here
    assert not Prospects(there_s=20, here_s=10).better_here
    assert not Prospects(there_s=20, here_s=2, as_expected=True).better_here
    assert Prospects(there_s=20, here_s=2, deadline_s=10, as_expected=True).better_here
    assert not Prospects(there_s=20, here_s=12, deadline_s=10).better_here
    assert not Prospects(there_s=20, here_s=0, deadline_s=10).better_here
    assert not Prospects(there_s=0, here_s=2).better_here


def test_what_was_taken_back_from_a_line_counts_before_what_is_asked_about_next() -> None:
    own, wait = OwnWork(), Wait(patience(1000, 100), 4, now=0.0)
    error = own.taken_back(3, own.prospects(wait, 100.0, here_ms=5000.0, now=10.0), 10.0)
    assert error is not None
    assert "3 are before it in 100.0 s of line, and here it takes 5.0 s" in str(error)
    assert own.prospects(wait, 100.0, here_ms=5000.0, now=12.0).here_s == pytest.approx(3 + 5)
    assert own.prospects(wait, 100.0, here_ms=5000.0, now=60.0).here_s == pytest.approx(5)
    assert own.prospects(wait, 100.0, here_ms=0.0, now=12.0).here_s == 0.0, "no idea"


def test_the_silence_of_a_line_is_granted_until_blocks_come() -> None:
    wait = Wait(Patience(total_s=4.0, stall_s=2.0, longest_s=60.0), 4, now=0.0)
    wait.in_line(silence_s=4.0, now=1.0)
    wait.hear(1.0)
    assert wait.overdue(3.5) is None
    wait.announced(1, 2.0)
    assert wait.overdue(3.9) is None
    assert "nothing was heard for 2.0 s" in str(wait.overdue(4.1))


def test_a_pace_is_learned_from_what_was_seen() -> None:
    pace = Pace()
    assert pace.expected_ms(1000) == 0
    pace.observe(1000, 500)
    assert pace.expected_ms(2000) == pytest.approx(1000)
    for _ in range(50):
        pace.observe(1000, 1000)
    assert pace.expected_ms(1000) == pytest.approx(1000, rel=0.01)


def test_a_hand_off_that_will_be_late_is_seen_early() -> None:
    limit = Patience(5.0, 2.5)
    progress = Progress(100)
    for at_s, blocks in ((3.0, 10), (3.3, 10)):
        progress.announced(at_s, blocks)
        assert progress.ends_s() is None
    progress.announced(3.6, 40)
    assert progress.ends_s() == pytest.approx(3.6 + 40 * 0.6 / 50)
    assert not progress.hopeless(limit)
    slow = Progress(100)
    for number in range(4):
        slow.announced(1.0 + number, 5)
    assert slow.ends_s() == pytest.approx(4.0 + 80 * 3 / 15)
    assert slow.hopeless(limit)


def card(**changes: object) -> ModelCard:
    fields = {
        "name": "m",
        "served_names": ["m"],
        "fingerprint": "f",
        "architecture": "A",
        "dtype": "float32",
        "kv_layout": "hw1.f32.l2.h2.d4.b16",
        "max_model_len": 64,
        "block_size": 16,
        "vocab_size": 9,
    }
    return ModelCard(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"fingerprint": "g"}, "model f here, g"),
        ({"dtype": "bfloat16"}, "KV type float32 here, bfloat16"),
        ({"block_size": 32}, "block size 16 here, 32"),
        ({"kv_layout": "hw1.f32.l2.h1.d4.b16"}, "KV layout"),
    ],
)
def test_blocks_that_do_not_fit_are_refused_by_name(change: dict[str, object], names: str) -> None:
    same = card()
    order = ExportOrder(0, 1.0, same.fingerprint, same.kv_layout, same.dtype, same.block_size)
    check_layouts(same, order)
    other = card(**change)
    order = ExportOrder(0, 1.0, other.fingerprint, other.kv_layout, other.dtype, other.block_size)
    with pytest.raises(TransferRefused, match=names):
        check_layouts(same, order)
