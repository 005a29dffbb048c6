import pytest
from hypothesis import given
from hypothesis import strategies as st

from longring.errors import ArgumentError
from longring.plan.quantities import LONGEST, MOST, count, spoken_bytes, spoken_count, spoken_seconds

MILLION = 1_000_000


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1M", MILLION),
        ("1m", MILLION),
        ("1Mi", 1 << 20),
        ("1MI", 1 << 20),
        ("1e6", MILLION),
        ("1E6", MILLION),
        ("1e+6", MILLION),
        ("1_000_000", MILLION),
        ("1,000,000", MILLION),
        ("1000000", MILLION),
        (" 1 M ", MILLION),
        ("1e3K", MILLION),
        ("1.5M", 1_500_000),
        ("1.5Ki", 1536),
        ("64K", 64_000),
        ("64Ki", 65_536),
        ("1G", 10**9),
        ("1Ti", 1 << 40),
        ("1e15", MOST),
        ("007", 7),
        (4096, 4096),
    ],
)
def test_counts_as_people_write_them(text, number):
    assert count(text) == number


NOT_NUMBERS = [
    "",
    " ",
    "1X",
    "M",
    "many",
    "1,5M",
    "10,00",
    "1__0",
    "_1",
    "1_",
    "1.",
    ".5M",
    "1e-3",
    "0x10",
    "1 2",
    "1MB",
]
NOT_IN_RANGE = ["0", "-1", "-5K", "1.5", "1.0001K", "1e16", "1e99", "9" * 400]


@pytest.mark.parametrize("text", [*NOT_NUMBERS, "1MB", "inf", "nan", "1e999", "+-1"])
def test_what_is_no_number_is_refused_with_examples(text):
    with pytest.raises(ArgumentError, match=r"^--tokens must be a number like .*1Mi, got ") as refused:
        count(text, of="--tokens")
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize("text", NOT_IN_RANGE)
def test_what_nobody_counts_to_is_refused_with_the_range(text):
    with pytest.raises(ArgumentError, match=r"^--tokens must be a whole number from 1 to 1000T, got ") as refused:
        count(text, of="--tokens")
    assert repr(text) in str(refused.value)


def test_the_least_may_be_nothing():
    assert count("0", least=0) == 0
    with pytest.raises(ArgumentError, match="from 0 to"):
        count("-1", least=0)


@given(st.integers(1, MOST))
def test_what_is_spoken_is_read_again(number):
    assert count(spoken_count(number)) == number
    assert count(f"{number:_}") == count(f"{number:,}") == count(number) == number


def test_numbers_as_people_read_them():
    assert [spoken_count(n) for n in (1_000_000, 64_000, 757, 1_234_567)] == ["1M", "64K", "757", "1,234,567"]
    assert [spoken_bytes(n) for n in (0, 1023, 1536, 3 << 30, 5000 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3 GiB",
        "5,000 TiB",
    ]
    assert [spoken_seconds(s) for s in (0, 3e-9, 2.5e-6, 0.0032, 1.5, 5400)] == [
        "0 s",
        "3 ns",
        "2.5 us",
        "3.2 ms",
        "1.5 s",
        "5,400 s",
    ]


@pytest.mark.parametrize("text", ["9" * 900_000, "1" + "_1" * 400_000, "1." + "0" * 900_000])
def test_counts_of_very_many_letters_are_refused_before_they_are_numbers(text):
    with pytest.raises(ArgumentError) as refused:
        count(text)
    assert f"of at most {LONGEST} letters, got {len(text):,}, beginning with " in str(refused.value)
    assert len(str(refused.value)) < 200
