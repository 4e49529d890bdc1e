"""The names of maps, constraints and penalties, as type checkers and schemas read them. Nothing here needs torch."""

from typing import Literal

Map = Literal["givens", "exponential", "cayley", "householder"]
HeadConstraint = Literal["value_out", "query_key", "attention"]  # on the weights of each head
WholeConstraint = Literal["whole_value_out", "whole_key_value"]  # on whole matrices, which alone a map can parametrise
Penalty = Literal["VAR-I", "VAR-II", "VAR-III", "VAR-II-separate", "heads"]
RETRACTION = "retraction"
