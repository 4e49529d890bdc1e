"""Types of settings that several studies share."""

from typing import Annotated

from pydantic import AfterValidator, Field

from pipeline.core.params import PositiveInt


def _has_full_rank(size: list[int]) -> list[int]:
    tokens, width = size
    if tokens < 2 * width:
        raise ValueError(f"N = {tokens} < 2 d_v = {2 * width}: M needs full rank for its condition")
    return size


HeadSize = Annotated[list[PositiveInt], Field(min_length=2, max_length=2), AfterValidator(_has_full_rank)]  # N, d_v
HeadSizes = Annotated[list[HeadSize], Field(min_length=1)]
Condition = Annotated[float, Field(ge=1)]
