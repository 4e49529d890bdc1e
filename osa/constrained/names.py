"""The names of maps, constraints and penalties, for type checkers, and for schemas that must not import torch."""

from typing import Literal

Map = Literal["givens", "exponential", "cayley", "householder"]
HeadConstraint = Literal["value_out", "query_key", "attention"]  # constraints on the weights of each head
WholeConstraint = Literal["whole_value_out", "whole_key_value"]  # constraints on whole matrices; a `Map` needs one of these
Penalty = Literal["VAR-I", "VAR-II", "VAR-III", "VAR-II-separate", "heads"]
RETRACTION = "retraction"
