"""The names of maps, constraints and penalties, for type checkers, and for schemas that must not import torch."""

from typing import Literal

Map = Literal["givens", "exponential", "cayley", "householder"]
HeadConstraint = Literal["value_out", "query_key", "attention"]  # the weights of each head are orthonormal
WholeConstraint = Literal["whole_value_out", "whole_key_value"]  # whole matrices are orthonormal, as each `Map` needs
Penalty = Literal["VAR-I", "VAR-II", "VAR-III", "VAR-II-separate", "heads"]
RETRACTION = "retraction"
