"""Memory follows the pixels of one's own images: a byte of a mapped file each, and next to nothing of its own."""

import re
import time

import pandas as pd
import pytest

from pipeline.benchmarks import memory


@pytest.mark.slow
def test_slopes_over_the_number_of_images(capsys):
    memory.main(["--counts", "1000,4000", "--size", "64"])
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 5
    slopes = {name: float(slope) for name, slope in re.findall(r"(\w+ \w+) (-?[\d.]+)", said[-1].partition(": ")[2])}
    for step in memory.STEPS:
        assert slopes[f"{step} anonymous"] < 0.3
        assert slopes[f"{step} mapped"] == pytest.approx(1, abs=0.2)


def test_what_is_held_for_a_while_is_seen():
    with memory.watched() as peaks:
        block = bytearray(b"1") * 100_000_000  # more than an allocator keeps for reuse
        time.sleep(0.2)
        del block
    assert peaks["RssAnon"] > 50_000_000


def test_a_slope_is_bytes_over_bytes():
    table = pd.DataFrame({"images": [1, 2, 3], "pixels": [10, 20, 30], "load mapped": [5, 15, 25]})
    assert memory.slopes(table) == {"load mapped": pytest.approx(1)}
