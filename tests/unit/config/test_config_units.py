import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.config.units import format_bytes, format_seconds, parse_bytes, parse_count, parse_seconds


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4_096", 4096),
        ("1k", 1000),
        ("1K", 1024),
        ("32K", 32768),
        ("25.6k", 25600),
        ("1.5K", 1536),
        ("2M", 2 * 1024**2),
        ("2m", 2_000_000),
        (" 8 k ", 8000),
    ],
)
def test_counts_read_as_vllm_users_expect(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("20GiB", 20 * 1024**3),
        ("20GB", 20 * 1000**3),
        ("512MiB", 512 * 1024**2),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("7B", 7),
        ("0.5GiB", 1024**3 // 2),
    ],
)
def test_bytes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("500ms", 0.5), ("2m", 120), ("30", 30), ("1.5h", 5400), ("1d", 86400), ("10us", 1e-5)]
)
def test_seconds(text: str, value: float) -> None:
    assert parse_seconds(text) == value


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5", "1x", "1 000", "0x10", "1e3", "nan", "inf", "9" * 60, "1KiB"])
def test_counts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a|unknown unit"):
        parse_count(text)


@pytest.mark.parametrize("text", ["5gib", "1KIB", "10 parsecs"])
def test_misspelled_byte_units_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a|unknown unit"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_bytes_survive_being_written(value: int) -> None:
    assert parse_bytes(format_bytes(value)) == value


@given(st.integers(min_value=0, max_value=10_000_000))
def test_seconds_survive_being_written(milliseconds: int) -> None:
    assert parse_seconds(format_seconds(milliseconds / 1000)) == pytest.approx(milliseconds / 1000)
