"""Defines the schemas of params.yaml and pipeline/paper.yaml, and derives the configuration of a run from them.

The user edits params.yaml. paper.yaml holds the paper's numbers, and a training recipe for each interpretation of the paper.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError
from ruamel.yaml import YAML

from osa.constrained.names import RETRACTION, HeadConstraint, Map, Penalty, WholeConstraint
from osa.options import (
    FIELD_TYPES,
    ITERATIONS,
    MAX_SIZE,
    METHODS,
    MODELS,
    Architecture,
    Initialisation,
    ModelConfig,
    Sizes,
    check_attention_options,
)
from pipeline.config.reading import UNREADABLE, in_repository, read_yaml, validate
from pipeline.core.errors import UserError, ended, hint
from pipeline.core.files import ROOT, read_json


def _distinct(items: list) -> list:
    twice = [item for item in items if items.count(item) > 1]
    if twice:
        raise ValueError(f"{twice[0]} is listed twice")
    return items


def _drawable(text: str) -> str:
    """Returns a label unchanged. Raises ValueError unless figures and pages can show it exactly as written."""
    if "$" in text:
        raise ValueError(f"{text!r} has a $, which figures take for mathematics; leave it out")
    if text.startswith("_"):
        raise ValueError(f"{text!r} begins with _, so legends would leave it out; start it with another character")
    if not text or text != " ".join(text.split()) or not text.isprintable():
        raise ValueError(f"{text!r} must be printable words separated by single spaces; write it as readers should see it")
    if strange := "" if text.isascii() else "".join(filter(_is_strange, text)):
        raise ValueError(f"{text!r} has {strange!r}, which figures cannot show; use other characters")
    return text


def _is_strange(letter: str) -> bool:
    """True if the figures' font lacks the letter, or if its script runs right to left: figures would reverse such text."""
    from matplotlib import font_manager  # slow to import; ASCII labels, the common case, never get here

    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    return not font.get_char_index(ord(letter)) or unicodedata.bidirectional(letter) in ("R", "AL")


Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]  # part of the names of DVC stages and folders
MAX_SEED = 2**31 - 1
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
AnySeeds = Annotated[list[Seed], AfterValidator(_distinct)]  # may be empty
Seeds = Annotated[AnySeeds, Field(min_length=1)]
PositiveInt = Annotated[int, Field(gt=0)]
Size = Annotated[int, Field(gt=0, le=MAX_SIZE)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class ImageFormat(NamedTuple):
    """The properties of a data set that determine the shapes of a model's input and output."""

    channels: int
    size: int  # height and width
    num_classes: int


MNIST_LIKE = ImageFormat(1, 28, 10)
PublishedSource = Literal["mnist", "sample", "fashion_mnist", "kmnist", "cifar10"]
PUBLISHED = dict.fromkeys(get_args(PublishedSource), MNIST_LIKE) | {"cifar10": ImageFormat(3, 32, 10)}
FIRST_READING = "first"  # key of the default recipe under `readings` in paper.yaml
# USER_FOLDER is the value of data.source for the user's images. DESCRIPTION is the file that describes these images.
USER_FOLDER, DESCRIPTION = "folder", "images.json"
IMAGE_KEYS = ("source", "path", "resize")  # keys under `data` that choose the images
SharedSection = Literal["data", "model", "init", "train"]  # sections that a variant may override
SHARED_SECTIONS = get_args(SharedSection)
Overrides = dict[SharedSection | Literal["variant"], dict[str, Any]]


class Section(BaseModel):
    """A block of params.yaml. Refuses unknown keys, and numbers written as text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, raw: Any) -> Any:
        """Reports an unknown key first. For a misspelt key, pydantic would report that the correct key is missing."""
        if isinstance(raw, dict) and cls.model_config["extra"] == "forbid":
            for key in itertools.filterfalse(cls.model_fields.__contains__, raw):
                shown = str(key).encode(errors="backslashreplace").decode()  # escapes lone surrogates
                raise PydanticCustomError("unknown_key", "{key}", {"key": shown, "hint": hint(key, cls.model_fields)})
        return raw


Labels = dict[Name, Annotated[str, AfterValidator(_drawable)]]


class Runs(Section):
    variants: Annotated[list[Name], Field(min_length=1), AfterValidator(_distinct)]
    seeds: Seeds


class Description(Section):
    """The content of data/folder/images.json, which describes the user's images."""

    path: str
    resize: Size | None
    sha256: str  # digest of the stored images and labels
    classes: list[str]
    channels: Literal[1, 3]
    size: PositiveInt


class Data(Section):
    source: Literal[PublishedSource, "folder"]
    pixel_scaling: Literal["unit", "half", "standard"]
    path: Annotated[str, Field(min_length=1)] | None = None
    resize: Size | None = None

    @model_validator(mode="after")
    def _path_is_there(self):
        if self.source == USER_FOLDER and self.path is None:
            raise ValueError("path is missing; source: folder needs the folder or archive of your images")
        return self

    @property
    def images(self) -> ImageFormat:
        """The format of the images. Raises UserError if the user's images have not been fetched yet."""
        if self.source != USER_FOLDER:
            return PUBLISHED[self.source]
        stored = self.description()
        return ImageFormat(stored.channels, stored.size, len(stored.classes))

    def description(self) -> Description:
        """Returns the description of the user's images. Raises UserError if it is absent, damaged or outdated."""
        folder = Path("data", USER_FOLDER)
        try:
            stored = read_description(folder)
        except UserError:  # images.json is absent or damaged
            stored = None
        if stored is None or (stored.path, stored.resize) != (self.path, self.resize):
            raise UserError(
                f"{folder} does not hold the images of data.path {self.path}: with that path in params.yaml, run "
                "`python -m pipeline fetch folder`."
            )
        return stored


def read_description(folder: str | Path) -> Description:
    """Reads the file that describes the user's images. Raises UserError if the file is absent or damaged."""
    path = Path(folder, DESCRIPTION)
    return validate(Description, read_json(path), str(path))


def options(
    group: type, *, absent: Iterable[str] = (), optional: Iterable[str] | None = None, **limits: Any
) -> type[Section]:
    """Creates the schema of a section of params.yaml from a dataclass of options, such as `osa.options.Sizes`.

    Args:
        absent: options to leave out of the section.
        optional: options that the user may omit. None stands for all options with a default.
        limits: further bounds by option name, each a dictionary of keyword arguments for `Field`.
    """
    keys: dict[str, Any] = {}
    for option in dataclasses.fields(group):
        if option.name in absent:
            continue
        has_default = option.default is not dataclasses.MISSING
        is_optional = has_default if optional is None else option.name in optional
        bounds = {BOUNDS[name]: bound for name, bound in option.metadata.items() if name in BOUNDS}
        bounds |= limits.get(option.name, {})
        kind = FIELD_TYPES[option.name]
        keys[option.name] = (kind | None, Field(None, **bounds)) if is_optional else (kind, Field(..., **bounds))
    return create_model(group.__name__, __base__=Section, **keys)


BOUNDS = {"above": "gt", "least": "ge", "below": "lt", "most": "le"}


# The type is Any because mypy cannot see the attributes of a class that is created at run time.
ModelKeys: Any = options(
    Sizes,
    absent=("image_size", "in_channels"),  # the data determine both options
    optional=("norm_eps",),
    num_classes={"ge": 2, "le": 10**4},
)
InitKeys: Any = options(Initialisation, optional=(), alpha={"ge": -1e6, "le": 1e6})
VariantKeys: Any = options(Architecture)


class Model(ModelKeys):
    """Model sizes, except image size and channels, which follow from the data."""


class Init(InitKeys):
    """The initialisation options, which apply to every architecture."""


class Train(Section):
    epochs: PositiveInt
    batch_size: Annotated[int, Field(gt=0, le=10**6)]
    learning_rate: PositiveFloat
    weight_decay: NonNegativeFloat
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]
    eps: PositiveFloat
    decay_all: bool
    clip_grad_norm: PositiveFloat
    drop_last: bool
    points_per_epoch: Annotated[int, Field(gt=0, le=1000)]
    optimizer: Literal["adamw", "muon"] = "adamw"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "cosine"] = "constant"
    perturbation: Annotated[int, Field(ge=0)] = 0  # seed of a perturbation of the initial weights; 0 for none
    held_out: Annotated[int, Field(ge=0)] = 0  # number of training images that replace the test images in a parameter search


class Variant(VariantKeys):
    """A model: its architecture, penalty, constraint and overrides of shared sections."""

    penalty: Penalty | None = None
    penalty_weight: NonNegativeFloat | None = None
    keep: HeadConstraint | WholeConstraint | None = None
    keep_by: Literal["retraction"] | Map | None = None
    overrides: dict[SharedSection, dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _orthogonality_fits(self):
        for key, other in (("penalty", "penalty_weight"), ("keep", "keep_by")):
            if (getattr(self, key) is None) != (getattr(self, other) is None):
                raise ValueError(f"{key} and {other} go together; write both or none")
        if self.keep in get_args(HeadConstraint) and self.keep_by != RETRACTION:
            raise ValueError(f"keep_by {self.keep_by} is for whole matrices; write retraction to keep {self.keep}")
        return self

    @model_validator(mode="after")
    def _method_fits(self):
        check_attention_options(self.model_dump())
        if self.attention == "orthogonal" and self.method is None:
            raise ValueError(f"method is missing; write one of {', '.join(METHODS)}")
        for key in ("num_iterations", "epsilon"):
            if self.method in ITERATIONS and getattr(self, key) is None:
                raise ValueError(f"{key} is missing; method {self.method} needs it")
            if self.method not in ITERATIONS and getattr(self, key) is not None:
                raise ValueError(f"{key} applies only to method {' or '.join(ITERATIONS)}; leave it out")
        return self

    def architecture(self) -> dict[str, Any]:
        """The architecture options that the variant sets, without its penalty, constraint and overrides."""
        keys = {option.name for option in dataclasses.fields(Architecture)}
        return self.model_dump(include=keys, exclude_none=True)


class Shared(Section):
    """The sections that all variants share."""

    data: Data
    model: Model
    init: Init
    train: Train

    @model_validator(mode="after")
    def _fits_published_images(self):
        if self.data.source != USER_FOLDER:
            self.check_images()
        return self

    def check_images(self) -> None:
        """Raises ValueError if the model has too few classes, or UserError if the user's images are not fetched yet."""
        num_classes, source = self.data.images.num_classes, self.data.source
        if self.model.num_classes < num_classes:
            raise ValueError(
                f"model.num_classes {self.model.num_classes} is less than the {num_classes} classes of {source}"
            )


class RunConfig(Shared):
    """The configuration of one run: its variant, and the shared sections with the variant's overrides applied."""

    variant: Variant

    @model_validator(mode="after")
    def _model_fits(self):
        if self.data.source == USER_FOLDER:  # the images may not have been fetched yet
            self._options_for(ImageFormat(1, self.model.patch_size, 0))
        else:
            self._options_for(self.data.images)
        return self

    @functools.cached_property
    def options(self) -> ModelConfig:
        """The configuration of the model, with image size and channels from the data."""
        return self._options_for(self.data.images)

    def _options_for(self, images: ImageFormat) -> ModelConfig:
        sections = self.model.model_dump(exclude_none=True) | self.init.model_dump(exclude_none=True)
        return ModelConfig(image_size=images.size, in_channels=images.channels, **sections, **self.variant.architecture())


class Params(Shared):
    """The content of params.yaml, plus the models of osa.MODELS and the labels of paper.yaml."""

    run: Runs
    variants: dict[Name, Variant]
    labels: Labels

    def label(self, variant: str) -> str:
        return self.labels.get(variant, variant)

    @model_validator(mode="after")
    def _names_exist(self):
        for place, names in {"run.variants": self.run.variants, "labels": self.labels}.items():
            for name in names:
                if name not in self.variants:
                    raise ValueError(f"{place} names {name!r}, which has no block under variants{hint(name, self.variants)}")
        return self


class OpenChoice(Section):
    """A detail that the paper leaves open."""

    topic: str
    paper: str | None  # what little the paper says about this detail
    ours: str  # our choice for this detail
    key: str | None = None  # key in params.yaml that sets this detail
    instead: str | None = None  # an alternative to our choice


class Paper(Section):
    """The content of pipeline/paper.yaml. This schema does not check the entries of `orders`."""

    title: str
    authors: str
    link: str
    table_2: dict[Name, float]
    labels: Labels
    readings: dict[Name, Shared]  # interpretations of Section 5 and Appendix D, with our choices where details are missing
    orders: dict[Name, dict[str, Any]]
    left_open: list[OpenChoice]

    @model_validator(mode="after")
    def _keys_exist(self):
        schemas = get_type_hints(Shared)
        known = {f"{section}.{key}" for section in SHARED_SECTIONS for key in schemas[section].model_fields}
        for key in filter(None, (choice.key for choice in self.left_open)):
            if key not in known and not key.startswith("variants."):
                raise ValueError(f"left_open names {key!r}, which is not a key{hint(key, sorted(known))}")
        return self


def load(path: str | Path = "params.yaml") -> Params:
    """Reads and checks params.yaml.

    Raises:
        UserError: the file is absent, is not YAML, or holds an unknown key, a wrong type or an impossible value.
    """
    written = read_yaml(path)
    params = validate(Params, with_library(written), str(path))
    for name in params.run.variants:
        if name not in written["variants"]:  # DVC reads variants from params.yaml, not from osa.MODELS
            block = ", ".join(f"{key}: {json.dumps(value)}" for key, value in MODELS[name].items())
            raise UserError(f"{path}: run.variants names {name!r}; write its block under variants: {name}: {{{block}}}.")
    for name in written["variants"]:  # models of osa.MODELS that params.yaml does not list are checked when used
        resolve(params, name)
    return params


def with_library(raw: Any) -> Any:
    """Adds the models of osa.MODELS and the labels of paper.yaml to the content of params.yaml, which takes precedence."""
    if not isinstance(raw, dict):
        return raw  # `validate` then raises an error
    raw = {"labels": {}} | raw
    library = {"variants": MODELS, "labels": read_yaml(ROOT / "pipeline/paper.yaml")["labels"]}
    return raw | {key: known | raw[key] for key, known in library.items() if isinstance(raw.get(key), dict)}


def load_paper() -> Paper:
    path = in_repository("pipeline/paper.yaml")
    return validate(Paper, read_yaml(path), str(path))


def resolve(params: Params, name: str, overrides: Overrides | None = None) -> RunConfig:
    """Returns the configuration of a variant. `overrides` takes precedence over the variant's own overrides.

    Raises:
        UserError: the variant does not exist, or an override is unknown or impossible.
    """
    if name not in params.variants:
        raise UserError(ended(f"params.yaml has no variants.{name}{hint(name, params.variants)}"))
    return _configure(params, params.data, name, params.variants[name], overrides)


def resolve_recipe(
    params: Params, paper: Paper, name: str, overrides: Overrides | None = None, reading: str = FIRST_READING
) -> RunConfig:
    """Returns a configuration: a model of osa.MODELS, an interpretation of the paper, and the image settings in params.yaml.

    Raises:
        UserError: the model or the reading does not exist, or an override is unknown or impossible.
    """
    if name not in MODELS:
        raise UserError(ended(f"osa.MODELS has no {name}{hint(name, MODELS)}"))
    if reading not in paper.readings:
        raise UserError(ended(f"pipeline/paper.yaml has no readings.{reading}{hint(reading, paper.readings)}"))
    return _configure(paper.readings[reading], params.data, name, Variant(**MODELS[name]), overrides)


def _configure(shared: Shared, fetched: Data, name: str, variant: Variant, overrides: Overrides | None) -> RunConfig:
    where = f"params.yaml: variants.{name}" + (".overrides" if variant.overrides else "")
    where = run_name(name, overrides) if overrides else where
    merged: dict[str, Any] = {section: getattr(shared, section).model_dump() for section in SHARED_SECTIONS}
    merged["variant"] = variant.model_dump(exclude={"overrides"})
    merged["data"] |= fetched.model_dump(include={*IMAGE_KEYS})
    for key in {*IMAGE_KEYS} & (variant.overrides or {}).get("data", {}).keys():
        raise UserError(
            f"{where}: data.{key} cannot be overridden, because all variants train on the data that fetch stores; set it "
            "under data in params.yaml."
        )
    layers: list[Mapping[Any, dict[str, Any]]] = [variant.overrides or {}, overrides or {}]
    for layer in layers:
        for section, values in layer.items():
            if section not in merged:
                raise UserError(ended(f"{where}: section {section} is unknown{hint(section, merged)}"))
            merged[section] |= values
    if merged["data"]["source"] != USER_FOLDER:
        merged["data"] |= {"path": None, "resize": None}  # keys for the user's images only
    return validate(RunConfig, merged, where)


def parse_overrides(texts: list[str]) -> Overrides:
    """Parses overrides from the command line: ["train.epochs=3"] gives {"train": {"epochs": 3}}. Values are YAML."""
    overrides: dict = {}
    for text in texts:
        key, equals, value = text.partition("=")
        section, dot, name = key.partition(".")
        if not (equals and dot and section and name):
            raise UserError(f"--set {text} is not of the form section.key=value, as in --set train.learning_rate=1e-3.")
        if name in overrides.get(section, {}):
            raise UserError(
                f"--set {text} sets {key} again: give each key once; to compare values, use `try` with --set {key}=1,2."
            )
        try:
            overrides.setdefault(section, {})[name] = YAML(typ="safe").load(value)
        except UNREADABLE:
            raise UserError(f"--set {text}: {value} is not valid YAML.") from None
    return overrides


def as_options(overrides: Overrides) -> list[str]:
    """The inverse of `parse_overrides`: {"train": {"epochs": 3}} gives ["--set", "train.epochs=3"]."""
    return [option for key, value in leaves(overrides).items() for option in ("--set", f"{key}={json.dumps(value)}")]


def leaves(overrides: Overrides) -> dict[str, Any]:
    """Flattens overrides to one dictionary, with keys such as train.learning_rate."""
    return {f"{section}.{key}": value for section, own in overrides.items() for key, value in own.items()}


def without_stage(arguments: list[str]) -> list[str]:
    """If the first argument is a DVC stage, replaces it with variant and seed: train@osa_qr-10 becomes osa_qr, 10."""
    first, *others = arguments or [""]
    is_stage = re.fullmatch(r"(?:.*:)?(?:train|evaluate)@(.*)", first, re.DOTALL)
    return [*is_stage[1].split("-"), *others] if is_stage else arguments


def seed(text: str) -> int:
    """Converts a command-line argument to a seed. Serves as `type` in argparse's `add_argument`."""
    if not (text.isascii() and text.isdigit() and int(text) <= MAX_SEED):
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {MAX_SEED}, not {text}")
    return int(text)


def run_name(variant: str, overrides: Overrides | None = None) -> str:
    """The name of a run's folder within its study: vit, or vit+init.head=zeros with an override."""
    changes = [f"{key}={as_yaml(value)}" for key, value in leaves(overrides or {}).items()]
    return "".join("+".join([variant, *sorted(changes)]).replace("/", "_").split())


def as_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
