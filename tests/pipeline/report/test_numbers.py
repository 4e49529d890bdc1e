"""Numbers as text."""

import math
from dataclasses import asdict

import numpy as np

from pipeline.report import numbers
from pipeline.report.numbers import fixed, grouped, interval, listing, mean_sd, number, percent, ranges, scripted, signed
from pipeline.statistics.intervals import summary_of

NUMBERS = [
    (0, "0"),
    (-0.0, "0"),
    (49, "49"),
    (-12.345, "−12.3"),
    (0.00123456, "0.00123"),
    (0.0009999, "0.001"),  # as rounded
    (0.00099, "9.9 × 10⁻⁴"),
    (-1.5e-13, "−1.5 × 10⁻¹³"),
    (999.6, "1\u202f000"),
    (-4096.0, "−4\u202f096"),
    (123_456, "1.23 × 10⁵"),
    (None, "–"),
    (math.nan, "–"),
    (-math.inf, "−∞"),
    (np.float32(3.14159), "3.14"),
    (np.int64(7), "7"),
]


def test_three_significant_digits(subtests):
    for value, text in NUMBERS:
        with subtests.test(value=value):
            assert number(value) == text


TEXTS = [
    (fixed(-0.004, 2), "0.00"),
    (fixed(-1.5, 1), "−1.5"),
    (fixed(math.nan, 1), "–"),
    (signed(0.25, 1), "+0.2"),
    (signed(-2.44, 1), "−2.4"),
    (mean_sd(asdict(summary_of([97.126]))), "97.13"),
    (mean_sd(asdict(summary_of([97.0, 98.0, 99.0])), 1), "98.0 ± 1.0"),
    (interval({"low": -1, "high": 2}, 0), "−1 to 2"),
    (interval({"low": math.nan, "high": math.nan}), "–"),
    (grouped(1234567), "1\u202f234\u202f567"),
    (grouped(-0.2), "0"),
    (percent(0.95), "95%"),
    (percent(None), "–"),
    (numbers.times(1.2249), "1.22 ×"),
    (numbers.words(3), "three"),
    (numbers.words(13), "13"),
    (numbers.span([3, 1, 2]), "one to three"),
    (numbers.span([5, 5]), "five"),
    (ranges([9, 0, 2, 1, 5]), "0 to 2, 5 and 9"),
    (listing(["a"]), "a"),
    (listing(["a", "b", "c"]), "a, b and c"),
]


def test_numbers_as_text(subtests):
    for text, expected in TEXTS:
        with subtests.test(expected=expected):
            assert text == expected


SCRIPTED = [
    ("W^V W^O", "W<sup>V</sup> W<sup>O</sup>"),
    ("κ(Σᵢ W^Vᵢ)", "κ(Σ<sub>i</sub> W<sup>V</sup><sub>i</sub>)"),
    ("‖J‖_F, [S]_1, 2d_v, √d_v", "‖J‖<sub>F</sub>, [S]<sub>1</sub>, 2d<sub>v</sub>, √d<sub>v</sub>"),
    ("X_l X_lᵀ", "X<sub>l</sub> X<sub>l</sub><sup>T</sup>"),
    ("N^1.98 and N^2.", "N<sup>1.98</sup> and N<sup>2</sup>."),
    ("e^{‖S‖₂} − M_{k+1}", "e<sup>‖S‖<sub>2</sub></sup> − M<sub>k+1</sub>"),
    ("‖B‖₂² ≤ 1.23 × 10⁻⁷", "‖B‖<sub>2</sub><sup>2</sup> ≤ 1.23 × 10<sup>−7</sup>"),
    ("1e-5, 3.2e+06", "10<sup>−5</sup>, 3.2 × 10<sup>6</sup>"),
    *((text, text) for text in ("left_open train.eps matrix_exp wide_vit x86_64", "c0de1e5, 12e3, v1e5", "a^ b_")),
]


def test_powers_and_indices(subtests):
    for text, shown in SCRIPTED:
        with subtests.test(text=text):
            assert scripted(text) == shown
