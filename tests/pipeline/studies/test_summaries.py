"""Summaries that studies share: layers as initialised and trained, the worst case of a check, claims about runs."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from pipeline import studies
from pipeline.core.files import ROOT
from pipeline.results import measures
from pipeline.statistics.claims import read_claims
from pipeline.studies._summaries import log_log_slope, trained_layers, worst_case
from pipeline.studies.deep import depth, six_blocks
from pipeline.studies.lab import initialised_layers
from pipeline.studies.orthogonal import keeping, penalties
from tests.pipeline.synthetic import SMALL


def test_every_layer_of_every_orthogonal_model_sees_what_the_model_passes_it(lab):
    layers, seen = initialised_layers(lab, 0), []
    for variant in measures.ORTHOGONAL:
        model = lab.model(lab.config(variant), 0).double()
        for number, block in enumerate(model.blocks, 1):
            identity = {"source": variant, "layer": number}
            block.attention.register_forward_pre_hook(lambda _, x, identity=identity: seen.append((identity, x[0])))
        model(lab.images()[0][: measures.LAYER_IMAGES])
    assert [name for name, *_ in layers] == [name for name, _ in seen] and len(seen) == 3 * SMALL["model"]["depth"]
    for (_, _, x), (_, expected) in zip(layers, seen, strict=True):
        torch.testing.assert_close(x, expected)


OF_STUDIES = {"deep": (depth, six_blocks), "orthogonal": (penalties, keeping)}


@pytest.mark.parametrize("wing", OF_STUDIES)
def test_claims_are_judged_by_runs_that_are_listed_or_of_table_2(wing, lab):
    claims = read_claims(ROOT / f"pipeline/studies/{wing}/claims.yaml")
    for study in OF_STUDIES[wing]:
        known = {*studies.settings(study.__name__.rpartition(".")[2]).runs, *lab.params.run.variants}
        own = [claims.pop(name) for name in study.CLAIMS]
        assert all(set(claim.models) <= known for claim in own)
        if wing == "orthogonal":  # whose claims are all predictions
            assert {claim.expected for claim in own} <= {"confirmed", "not confirmed", "undecided"}
            assert all(claim.why for claim in own)
    assert set(claims) <= {"penalties_boost_transduction"}, "no claim without its study"


def test_layers_that_are_not_evaluated_are_left_out(lab):
    assert trained_layers(lab, "error_max").empty
    for table in ({}, {"variant": ["osa_ns"], "seed": [0]}, {"variant": ["osa_ns"], "seed": [0], "error_max": [np.nan]}):
        lab.tables = {"layers": pd.DataFrame(table)}
        assert trained_layers(lab, "error_max").empty


def test_the_worst_case_uses_up_most_of_its_limit():
    assert worst_case([3.0, 1.0, 2.0], [30.0, 2.0, 40.0])["value"] == 1.0
    assert worst_case(pd.Series([0.1, 0.3]), 0.2)["holds"] is False
    assert worst_case([0.1, math.nan], 1.0)["holds"] is False


def test_slope_of_a_power_is_its_exponent():
    size = np.array([2, 4, 8, 16])
    assert log_log_slope(size, 7.0 * size**3) == pytest.approx(3)
