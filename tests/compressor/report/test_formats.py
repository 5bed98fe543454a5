import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.report import formats


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (371_600, "372 kB"),
        (999_400, "999 kB"),
        (999_500, "1.00 MB"),
        (1_034_000, "1.03 MB"),
        (10_300_000, "10.3 MB"),
        (4_000_000_000_000_000, "4,000 TB"),
    ],
)
def test_sizes_have_three_digits_and_decimal_units(value: int, text: str):
    assert formats.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.344, "0.34 ×"), (1.0, "1.00 ×"), (0.0344, "0.034 ×"), (12.345, "12.35 ×"), (250, "250 ×")],
)
def test_ratios(value: float, text: str):
    assert formats.ratio(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (125.2, "2 min 05 s"),
        (3840, "1 h 04 min"),
    ],
)
def test_durations(value: float, text: str):
    assert formats.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.4123, "0.412 ms"), (12.345, "12.3 ms"), (1234.5, "1,230 ms"), (0.00412, "0.00412 ms")],
)
def test_latencies(value: float, text: str):
    assert formats.milliseconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (5.6834, "5.683"),
        (-0.01234, "−0.01234"),
        (1.3e-5, "1.300e-05"),
        (-1.3e-5, "−1.300e-05"),
        (123456.0, "123,456"),
        (2e10, "2.000e+10"),
    ],
)
def test_numbers(value: float, text: str):
    assert formats.number(value) == text


def test_a_negative_zero_has_no_sign():
    assert formats.percent(-0.001) == "0.00 %"
    assert formats.decibel(-0.01) == "0.0 dB"
    assert formats.metric_change(-0.001, share=True) == "0.00 points"


def test_negative_numbers_have_a_true_minus():
    assert formats.metric_change(-0.12, share=True) == "−0.12 points"
    assert formats.decibel(-3.21) == "−3.2 dB"


def test_an_interval_has_the_decimals_of_its_value():
    perplexity = {"value": 5.6834, "ci95": [5.6, 5.76789], "unit": ""}
    assert formats.metric(perplexity) == "5.683"
    assert formats.metric_interval(perplexity) == "5.600 to 5.768"
    tiny = {"value": 1.3e-5, "ci95": [1e-5, 1.6e-5], "unit": ""}
    assert formats.metric_interval(tiny) == "1.000e-05 to 1.600e-05"


def test_numbers_that_differ_look_different():
    assert formats.compared(0.5, 0.5) == ("0.50", "0.50")
    assert formats.compared(0.5004, 0.5) == ("0.5004", "0.5000")
    assert formats.compared(1.0001e-5, 1e-5, significant=True) == ("1.0001e-05", "1.0000e-05")


@given(st.integers(min_value=0, max_value=10**15))
def test_a_size_is_within_half_a_percent(value: int):
    digits, unit = formats.size(value).split()
    factor = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    assert float(digits.replace(",", "")) * factor == pytest.approx(value, rel=0.005, abs=0.5)


@given(st.floats(min_value=1e-6, max_value=1e6), st.floats(min_value=1e-6, max_value=1e6))
def test_compared_never_hides_a_relative_difference(value: float, other: float):
    texts = formats.compared(value, other, significant=True)
    assert texts[0] != texts[1] or abs(value - other) <= 1e-8 * max(value, other)


def test_a_metric_with_its_worst_sample() -> None:
    assert formats.metric({"value": 0.99821, "unit": "", "worst": 0.9934}) == (
        "0.9982 (worst 0.9934)"
    )
