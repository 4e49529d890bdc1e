"""Type checkers see options as they are, so that they find a misspelt one: `typed_calls.py` has some for mypy."""

from typing import get_args, get_type_hints

from osa import models, options
from osa.constrained import names, orthogonal, penalties
from osa.modules import OrthogonalSelfAttention
from osa.options import METHODS, MethodOptions


def test_the_keywords_are_the_options():
    assert get_type_hints(options.ModelOptions) == options.FIELD_TYPES
    assert list(options.ModelOptions.__annotations__) == list(models.FIELDS)
    words = {
        options.AttentionKind: models.ATTENTION,
        options.AttentionInit: models.ATTENTION_INIT,
        options.MLPInit: models.MLP_INIT,
        options.ActivationKind: models.ACTIVATION,
        options.LinearInit: models.PATCH_EMBEDDING_INIT,
        options.HeadInit: models.HEAD_INIT,
        names.Map: orthogonal.MAPS,
        names.Penalty: penalties.PENALTIES,
    }
    assert all(get_args(kind) == tuple(known) for kind, known in words.items())
    assert get_args(get_type_hints(MethodOptions)["method"]) == METHODS
    per_head = {name for name, constraint in orthogonal.CONSTRAINTS.items() if constraint.per_head}
    assert per_head == {*get_args(names.HeadConstraint)}
    assert orthogonal.CONSTRAINTS.keys() - per_head == {*get_args(names.WholeConstraint)}
    assert get_type_hints(MethodOptions).keys() == OrthogonalSelfAttention(12, 3).options.keys()
