"""Types of settings that several studies share."""

from typing import Annotated

from pydantic import AfterValidator, Field

from pipeline.config.params import PositiveInt


def _has_full_rank(size: list[int]) -> list[int]:
    tokens, width = size
    if tokens < 2 * width:
        raise ValueError(
            f"N = {tokens} is below 2 d_v = {2 * width}: M needs full column rank for its condition number; "
            "write a larger N or a smaller d_v"
        )
    return size


def _rise(depths: list[int]) -> list[int]:
    if len(depths) < 2 or depths != sorted(set(depths)):
        raise ValueError(f"must have two or more entries, in increasing order without repeats, not {depths}")
    return depths


Depths = Annotated[list[PositiveInt], AfterValidator(_rise)]
HeadSize = Annotated[list[PositiveInt], Field(min_length=2, max_length=2), AfterValidator(_has_full_rank)]  # N, d_v
HeadSizes = Annotated[list[HeadSize], Field(min_length=1)]
Condition = Annotated[float, Field(ge=1)]
