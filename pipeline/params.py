"""The typed schema of params.yaml, and its only reader.

The schema checks and never supplies a value: whatever can change a number stands in params.yaml, where DVC tracks it.
"""

import difflib
import math
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML, YAMLError

from pipeline.errors import UserError

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]  # also a stage name and a folder
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
SharedSection = Literal["data", "model", "init", "train"]  # what a variant may override
SHARED = get_args(SharedSection)


class Section(BaseModel):
    """A block of params.yaml: unknown keys and numbers written as text are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Run(Section):
    variants: Annotated[list[Name], Field(min_length=1)]
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class File(Section):
    bytes: PositiveInt
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


FileName = Literal[
    "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"
]


class Fetch(Section):
    mirrors: list[str]
    timeout_seconds: PositiveFloat
    deadline_seconds: PositiveFloat
    retries: Annotated[int, Field(ge=0)]
    files: Annotated[dict[FileName, File], Field(min_length=4)]


class Data(Section):
    source: Literal["mnist", "sample"]
    pixel_scaling: Literal["unit", "standard"]


class Model(Section):
    image_size: PositiveInt
    patch_size: PositiveInt
    num_classes: Annotated[int, Field(ge=10)]  # the digits
    embed_dim: PositiveInt
    depth: PositiveInt
    num_heads: PositiveInt
    mlp_ratio: PositiveFloat

    @model_validator(mode="after")
    def _divides(self):
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size {self.patch_size} must divide image_size {self.image_size}")
        if self.embed_dim % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} must divide embed_dim {self.embed_dim}")
        if self.embed_dim * self.mlp_ratio < 1:
            raise ValueError(f"mlp_ratio {self.mlp_ratio} leaves the MLPs no hidden unit; write 1 / embed_dim or more")
        return self


class Init(Section):
    alpha: float
    embedding_std: PositiveFloat
    alpha_per_head: bool
    xavier_fused_qkv: bool
    suo_transposed: bool
    patch_embedding: Literal["xavier", "torch"]
    head: Literal["xavier", "zeros", "torch"]


class Train(Section):
    epochs: PositiveInt
    batch_size: PositiveInt
    learning_rate: PositiveFloat
    weight_decay: NonNegativeFloat
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]
    eps: PositiveFloat
    decay_all: bool
    clip_grad_norm: PositiveFloat
    drop_last: bool
    points_per_epoch: PositiveInt


class Variant(Section):
    """One model. Only the keys that do not apply to every attention may be left out."""

    attention: Literal["orthogonal", "softmax"]
    skip: bool
    norm: bool
    init: Literal["osa", "xavier"]
    method: Literal["qr", "newton_schulz", "exact", "polar_express"] | None = None
    num_iterations: PositiveInt | None = None
    epsilon: NonNegativeFloat | None = None
    overrides: dict[SharedSection, dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _method_fits(self):
        if self.attention == "orthogonal" and self.method is None:
            raise ValueError("method is missing; write qr, newton_schulz, exact or polar_express")
        if self.attention == "softmax" and self.method:
            raise ValueError("method belongs to attention: orthogonal")
        iterates = self.method in ("newton_schulz", "polar_express")
        for key in ("num_iterations", "epsilon"):
            if iterates and getattr(self, key) is None:
                raise ValueError(f"{key} is missing; method {self.method} needs it")
            if not iterates and getattr(self, key) is not None:
                raise ValueError(f"{key} belongs to method: newton_schulz or polar_express")
        if "source" in (self.overrides or {}).get("data", {}):
            raise ValueError("overrides cannot replace data.source: all variants learn from the data that fetch stores")
        return self


class Alternative(Section):
    """One training of a variant with something else in place of a value that the paper leaves open."""

    variant: Name
    overrides: Annotated[dict[SharedSection | Literal["variant"], dict[str, Any]], Field(min_length=1)]


class Choices(Section):
    """Trainings that show what hangs on a choice. `computes`: which variant of the paper has the function of one of ours."""

    seed: Annotated[int, Field(ge=0)]
    computes: dict[Name, Name]
    runs: dict[Name, Alternative]


class Evaluate(Section):
    batch_size: PositiveInt
    attention_images: PositiveInt
    tolerance_images: Annotated[int, Field(ge=0)]


class Tables(Section):
    confidence: Fraction


Seeds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
HeadSize = Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]  # N, d_v
LayerSize = Annotated[list[PositiveInt], Field(min_length=3, max_length=3)]  # N, d, h
AtLeastOne = Annotated[float, Field(ge=1)]


class Theorem21(Section):
    sizes: Annotated[list[HeadSize], Field(min_length=1)]
    norms: Annotated[list[PositiveFloat], Field(min_length=2)]
    conditions: Annotated[list[AtLeastOne], Field(min_length=2)]
    norm: PositiveFloat


class Theorem22(Section):
    depths: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2)]
    alphas: Annotated[list[PositiveFloat], Field(min_length=1)]
    tolerance: PositiveFloat

    @model_validator(mode="after")
    def _depths_rise(self):
        if self.depths[0] != 0 or self.depths != sorted(set(self.depths)):
            raise ValueError("depths must rise from 0")
        return self


class Theorem31(Section):
    sizes: Annotated[list[HeadSize], Field(min_length=1)]
    iterations: PositiveInt
    norms: Annotated[list[PositiveFloat], Field(min_length=1)]
    conditions: Annotated[list[AtLeastOne], Field(min_length=1)]


class Theorem41(Section):
    sizes: Annotated[list[LayerSize], Field(min_length=1)]
    alpha: PositiveFloat


class Theorem42(Section):
    sizes: Annotated[list[HeadSize], Field(min_length=1)]  # d, h


class Theorems4344(Section):
    sizes: Annotated[list[LayerSize], Field(min_length=1)]
    alphas: Annotated[list[PositiveFloat], Field(min_length=3)]
    fit_below: PositiveFloat
    slope_tolerance: PositiveFloat
    confidence: Fraction
    heads: PositiveInt
    layer_stride: PositiveInt

    @model_validator(mode="after")
    def _fit_has_points(self):
        if sum(alpha <= self.fit_below for alpha in self.alphas) < 3:
            raise ValueError(f"fit_below {self.fit_below:g} leaves fewer than 3 of alphas to fit a slope with an interval")
        return self


class Trainability(Section):
    models: Annotated[list[Name], Field(min_length=1)]
    baseline: Name
    depths: Annotated[list[PositiveInt], Field(min_length=2)]
    gradient_images: PositiveInt
    samples: PositiveInt
    power_iterations: PositiveInt
    gain_factor: Annotated[float, Field(gt=1)]

    @model_validator(mode="after")
    def _baseline_is_measured(self):
        if self.baseline not in self.models:
            raise ValueError(f"baseline {self.baseline!r} must be one of models")
        return self


class Theory(Section):
    """One block for each finding."""

    seeds: Seeds
    images: PositiveInt
    products: PositiveInt
    theorem_2_1: Theorem21
    theorem_2_2: Theorem22
    theorem_3_1: Theorem31
    theorem_4_1: Theorem41
    theorem_4_2: Theorem42
    theorems_4_3_4_4: Theorems4344
    trainability: Trainability

    @model_validator(mode="after")
    def _shapes_fit(self):
        for key in ("theorem_2_1", "theorem_3_1"):
            for tokens, width in getattr(self, key).sizes:
                if tokens < 2 * width:
                    raise ValueError(
                        f"{key}.sizes has N = {tokens} < 2 d_v = {2 * width}: M needs full rank for its condition"
                    )
        for key in ("theorem_4_1", "theorem_4_2", "theorems_4_3_4_4"):
            for *_, d, heads in getattr(self, key).sizes:
                if heads < 2 or d % heads:
                    raise ValueError(f"{key}.sizes has h = {heads} for d = {d}: h must be 2 or more and divide d")
        return self


class Tracking(Section):
    experiment: Annotated[str, Field(min_length=1)]


class TokenSweep(Section):
    sizes: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=3)]
    width: PositiveInt


class WidthSweep(Section):
    sizes: Annotated[list[PositiveInt], Field(min_length=3)]
    tokens: PositiveInt


class JointSweep(Section):
    sizes: Annotated[list[PositiveInt], Field(min_length=3)]
    tokens_per_width: PositiveInt


_TERM = r"(N(\^\d)?( d(\^\d)?)?|d(\^\d)?)"
Order = Annotated[str, Field(pattern=rf"^{_TERM}( \+ {_TERM})*$")]  # what stands inside O(…)


class Orders(Section):
    operations: Order
    memory: Order | None


class Complexity(Section):
    seed: Annotated[int, Field(ge=0)]
    norm: PositiveFloat
    decay: NonNegativeFloat
    num_iterations: PositiveInt
    tokens: TokenSweep
    widths: WidthSweep
    joint: JointSweep
    norms: Annotated[list[PositiveFloat], Field(min_length=2)]
    most_tokens_matrix: PositiveInt
    most_tokens_exponential: PositiveInt
    repeats: PositiveInt
    sample_seconds: PositiveFloat
    fit_points: Annotated[int, Field(ge=3)]
    confidence: Fraction
    tolerance: NonNegativeFloat
    paper: dict[Literal["qr", "newton_schulz", "small", "exponential", "application", "osa", "softmax", "naive"], Orders]

    @model_validator(mode="after")
    def _basis_is_narrow(self):
        """M is N×2d with 2d ≤ N, as in Section 3."""
        points = [(n, self.tokens.width) for n in self.tokens.sizes] + [(self.widths.tokens, d) for d in self.widths.sizes]
        points += [(self.joint.tokens_per_width, 1)]
        for tokens, width in points:
            if tokens < 2 * width:
                raise ValueError(f"{tokens} tokens are fewer than twice the width {width}: Table 1 is about 2d ≤ N")
        return self

    @model_validator(mode="after")
    def _slopes_can_be_fitted(self):
        for key in ("tokens", "widths", "joint"):
            sizes = getattr(self, key).sizes
            if sizes != sorted(set(sizes)):
                raise ValueError(f"{key}.sizes should rise")
        for key in ("most_tokens_matrix", "most_tokens_exponential"):
            if sum(n <= getattr(self, key) for n in self.tokens.sizes) < 3:
                raise ValueError(f"{key} leaves fewer than 3 of tokens.sizes, too few for a slope")
        return self


class Paper(Section):
    title: str
    authors: str
    table_2: dict[Name, float]
    settings: dict[SharedSection, dict[str, Any]]


class Claim(Section):
    """A sentence of the paper and what it is taken to mean. Every kind adds its thresholds and its variants."""

    title: str
    sentence: str
    place: str
    definition: str

    @model_validator(mode="after")
    def _definition_formats(self):
        try:
            self.rule()
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"definition cannot be filled in ({error}); in braces stands a key beside it") from None
        return self

    def rule(self) -> str:
        """The definition with the values of its keys in place."""
        return self.definition.format(**self.model_dump())


class ComparingClaim(Claim):
    """About pairs of variants, the first of which should do better."""

    compare: Annotated[list[Annotated[list[Name], Field(min_length=2, max_length=2)]], Field(min_length=1)]

    def names(self) -> list[str]:
        return [name for pair in self.compare for name in pair]


class AccuracyClaim(ComparingClaim):
    kind: Literal["accuracy"]
    tolerance_points: NonNegativeFloat


class SpeedClaim(ComparingClaim):
    kind: Literal["speed"]
    of_training: Fraction
    at_most_factor: PositiveFloat

    @model_validator(mode="after")
    def _factor_fits(self):
        if self.at_most_factor * self.of_training >= 1:
            raise ValueError("at_most_factor × of_training must be below 1, or training ends before it is exceeded")
        return self


class DropsClaim(Claim):
    kind: Literal["drops"]
    models: Annotated[list[Name], Field(min_length=3, max_length=3)]

    def names(self) -> list[str]:
        return self.models


class StabilityClaim(Claim):
    kind: Literal["stability"]
    models: Annotated[list[Name], Field(min_length=1)]
    at_most_rise: Annotated[float, Field(gt=1)]
    at_least_runs: PositiveInt

    def names(self) -> list[str]:
        return self.models


AnyClaim = Annotated[AccuracyClaim | SpeedClaim | DropsClaim | StabilityClaim, Field(discriminator="kind")]


class Choice(Section):
    """Something that the paper leaves open: what we do is the value of `key`, or else `ours`."""

    topic: str
    paper: str
    why: str
    key: str | None = None
    ours: str | None = None

    @model_validator(mode="after")
    def _one_value(self):
        if (self.key is None) == (self.ours is None):
            raise ValueError("give either key, whose value is shown, or ours")
        return self


class Report(Section):
    labels: dict[Name, str]
    choices: list[Choice]


class RunConfig(Section):
    """What one training is made of: the shared sections after a variant's overrides."""

    data: Data
    model: Model
    init: Init
    train: Train
    variant: Variant

    @model_validator(mode="after")
    def _basis_fits(self):
        if self.variant.attention == "orthogonal" and self.model.num_heads == 1:
            d = self.model.embed_dim
            raise ValueError(f"model.num_heads 1 gives 2d_v = {2 * d} > d = {d}; orthogonal attention needs 2 or more heads")
        return self


class Params(Section):
    run: Run
    fetch: Fetch
    data: Data
    model: Model
    init: Init
    train: Train
    variants: dict[Name, Variant]
    choices: Choices
    evaluate: Evaluate
    tables: Tables
    theory: Theory
    complexity: Complexity
    tracking: Tracking
    quickstart: dict[Literal["data", "run", "model", "train", "choices", "theory", "complexity"], dict[str, Any]]
    paper: Paper
    claims: dict[Name, AnyClaim]
    report: Report

    def label(self, variant: str) -> str:
        """What a reader calls a variant; one that is not listed goes by its own name."""
        return self.report.labels.get(variant, variant)

    def value(self, key: str) -> Any:
        """What stands under a key that is written with dots, as in train.epochs."""
        content = self.model_dump()
        for part in key.split("."):
            content = content[part]
        return content

    @model_validator(mode="after")
    def _names_exist(self):
        places = {"run.variants": self.run.variants}
        places |= {"paper.table_2": self.paper.table_2, "report.labels": self.report.labels}
        places["theory.trainability"] = self.theory.trainability.models
        places |= {f"choices.runs.{key}": [run.variant] for key, run in self.choices.runs.items()}
        places["choices.computes"] = [*self.choices.computes, *self.choices.computes.values()]
        places |= {f"claims.{key}": claim.names() for key, claim in self.claims.items()}
        for place, names in places.items():
            for name in names:
                if name not in self.variants:
                    hint = _hint(name, self.variants)
                    raise ValueError(f"{place} names {name!r}, which has no block under variants{hint}")
        both = sorted(self.variants.keys() & self.choices.runs.keys())
        if both:
            raise ValueError(f"choices.runs.{both[0]} has the name of a variant, whose runs it would replace")
        for key, items in (("variants", self.run.variants), ("seeds", self.run.seeds)):
            twice = [item for item in items if items.count(item) > 1]
            if twice:
                raise ValueError(f"run.{key} lists {twice[0]} twice")
        return self

    @model_validator(mode="after")
    def _keys_exist(self):
        keys = {f"{section}.{key}" for section in SHARED for key in type(getattr(self, section)).model_fields}
        own = {f"variants.{name}.{key}" for name, variant in self.variants.items() for key in variant.model_fields_set}
        stated = [f"{section}.{key}" for section, values in self.paper.settings.items() for key in values]
        chosen = [choice.key for choice in self.report.choices if choice.key]
        for place, names, known in (("paper.settings", stated, keys), ("report.choices", chosen, keys | own)):
            for name in names:
                if name not in known:
                    raise ValueError(f"{place} names {name!r}, which is not a key{_hint(name, sorted(known))}")
        return self


def load(path: str | Path = "params.yaml") -> Params:
    """Reads and checks params.yaml.

    Raises:
        UserError: the file is absent, is not YAML, or holds an unknown key, a wrong type or an impossible value.
    """
    params = _validate(Params, read(path), str(path))
    for name in (*params.variants, *params.choices.runs):
        resolve(params, name)
    return params


def resolve(params: Params, name: str) -> RunConfig:
    """The configuration of a variant, or of a run of `choices`: the shared sections with its overrides in place.

    Raises:
        UserError: there is no such variant, or an override is unknown or impossible.
    """
    if name in params.choices.runs:
        block, where = params.choices.runs[name], f"choices.runs.{name}"
        variant, layers = params.variants[block.variant], [params.variants[block.variant].overrides, block.overrides]
    elif name in params.variants:
        variant, where = params.variants[name], f"variants.{name}"
        layers = [variant.overrides]
    else:
        raise UserError(_ended(f"params.yaml has no variants.{name}{_hint(name, params.variants)}"))
    merged = {section: getattr(params, section).model_dump() for section in SHARED}
    merged["variant"] = variant.model_dump(exclude={"overrides"})
    for layer in filter(None, layers):
        for section, values in layer.items():
            merged[section] |= values
    return _validate(RunConfig, merged, f"params.yaml: {where}" + (".overrides" if any(layers) else ""))


def read(path: str | Path) -> Any:
    """The file's content, unchecked. Raises UserError if it is absent or not YAML.

    The parser is DVC's, so that a value is here what DVC tracks. PyYAML follows YAML 1.1, where 1e-06 is text, 1:30 is 90
    and a key that occurs twice is no error.
    """
    try:
        return YAML(typ="safe").load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: run from the repository root, or `git checkout {path}`.") from None
    except (YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{path} is not valid YAML{place}: {problem}; mend it, or `git checkout {path}`.") from None


def _validate(schema: type[Section], raw: Any, where: str):
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        # A mistyped key is unknown and leaves another one missing: the first of the two says what happened.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        raise UserError(_ended(f"{where}: {_sentence(first, schema, raw)}")) from None


EXPECTATIONS = {  # where pydantic speaks of Python
    "bool_type": "should be true or false",
    "int_type": "should be a whole number",
    "float_type": "should be a number",
    "string_type": "should be text",
    "list_type": "should be a list, as in [a, b]",
    "dict_type": "should be a block of keys",
    "model_type": "should be a block of keys",
    "too_short": "should have {min_length} or more entries",
    "too_long": "should have at most {max_length} entries",
    "string_too_short": "should be text",
    "missing": "is missing",
    "union_tag_not_found": "has no {discriminator}",
    "union_tag_invalid": "has the unknown {discriminator} {tag!r}: write one of {expected_tags}",
}


def _sentence(error: dict, schema: type[Section], raw: Any) -> str:
    """An error of a validation: the key, what is expected there, and what was found."""
    key, kind, value = _key(error["loc"], raw), error["type"], error["input"]
    if kind == "extra_forbidden":
        return f"{key} is not a known key{_hint(error['loc'][-1], _siblings(error['loc'], schema))}"
    if kind == "value_error":
        message = str(error["ctx"]["error"])
        return f"{key}: {message}" if key else message
    if kind in ("int_type", "float_type") and isinstance(value, str) and _is_number(value):
        return f"{key}: {value!r} is read as text; write {value} without quotes"
    message = error["msg"].removeprefix("Input ").removeprefix("String ")
    expectation = EXPECTATIONS[kind].format_map(error.get("ctx", {})) if kind in EXPECTATIONS else message
    found = "" if isinstance(value, dict) else ", but is empty" if value in (None, "") else f", not {value!r}"
    return f"{key or 'the file'} {expectation}{found}"


def _key(location: tuple, raw: Any) -> str:
    """Where in params.yaml an error is, in dots."""
    parts = []
    for part in location:
        is_tag = isinstance(raw, dict) and raw.get("kind") == part  # pydantic names the kind of claim here
        if not is_tag and part != "[key]":
            parts.append(str(part))
            raw = raw.get(part) if isinstance(raw, dict) else raw[part] if isinstance(raw, list) else None
    return ".".join(parts)


def _siblings(location: tuple, schema: type[Section]) -> list[str]:
    """The keys that the schema knows beside the last part of `location`."""
    schemas = [schema]
    for part in location[:-1]:
        fields = [each.model_fields[part].annotation for each in schemas if part in each.model_fields]
        inner = [each for field in fields for each in _schemas(field)]
        schemas = inner or [each for each in schemas if part in _kind(each)] or schemas
    return [key for each in schemas for key in each.model_fields]


def _kind(schema: type[Section]) -> tuple[str, ...]:
    return get_args(schema.model_fields["kind"].annotation) if "kind" in schema.model_fields else ()


def _schemas(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, Section) else []
    return [schema for argument in get_args(annotation) for schema in _schemas(argument)]


def _hint(name: object, known) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}" if known else ""


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith("?") else f"{sentence}."


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
