"""Types of settings that several studies share."""

from typing import Annotated

from pydantic import AfterValidator, Field

from pipeline.config.params import PositiveInt


def _has_full_rank(size: list[int]) -> list[int]:
    tokens, width = size
    if tokens < 2 * width:
        raise ValueError(f"N = {tokens} < 2 d_v = {2 * width}: M needs full rank for its condition")
    return size


def _rise(depths: list[int]) -> list[int]:
    if len(depths) < 2 or depths != sorted(set(depths)):
        raise ValueError("should be two or more, in rising order")
    return depths


Depths = Annotated[list[PositiveInt], AfterValidator(_rise)]
HeadSize = Annotated[list[PositiveInt], Field(min_length=2, max_length=2), AfterValidator(_has_full_rank)]  # N, d_v
HeadSizes = Annotated[list[HeadSize], Field(min_length=1)]
Condition = Annotated[float, Field(ge=1)]
