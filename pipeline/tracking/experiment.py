"""The experiment in MLflow, and its runs as one search finds them."""

import getpass
import os
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.config.looks import INK, look_of
from pipeline.core.errors import UserError
from pipeline.tracking import notes, store
from pipeline.tracking.records import TABLE_2, Value
from pipeline.tracking.views import views

NAME = "Orthogonal Self-Attention"
GREY = "#808080"  # for Figure 1's ink, which MLflow's dark scheme would hide
MOST_RUNS = 50_000  # as many as MLflow finds in one search


@dataclass
class Entry:
    """A run in MLflow: a child carries the name of its training, table_2/osa_qr/0, and a parent that of its family."""

    id: str
    name: str
    start: int  # in milliseconds since 1970
    status: str
    tags: dict[str, str]
    parameters: dict[str, str]
    metrics: dict[str, float]  # the last values
    place: str  # URI of its artifacts

    @classmethod
    def of(cls, run: Any) -> "Entry":
        """A run of MLflow's; one of somebody's own has no name. In older stores the name is a parameter too."""
        tags, parameters = run.data.tags, run.data.params
        name = tags.get("run") or parameters.get("run", "")
        info = run.info
        return cls(info.run_id, name, info.start_time, info.status, tags, parameters, run.data.metrics, info.artifact_uri)

    @property
    def family(self) -> str:
        return "/".join(self.name.split("/")[:2])

    @property
    def is_parent(self) -> bool:
        return self.name == self.family


class Experiment:
    """The experiment, which it makes if there is none, with its views."""

    def __init__(self, client: Any) -> None:
        self.client = client
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or NAME
        if (present := client.get_experiment_by_name(name)) is None:
            tags = {"mlflow.note.content": notes.EXPERIMENT, "mlflow.experimentKind": "custom_model_development"}
            present = client.get_experiment(client.create_experiment(name, store.artifacts(), tags))
        elif present.lifecycle_stage == "deleted":
            client.restore_experiment(present.experiment_id)
        self.id = present.experiment_id
        for key, view in views().items():
            if present.tags.get(f"mlflow.sharedViewState.{key}") != view:
                client.set_experiment_tag(self.id, f"mlflow.sharedViewState.{key}", view)

    @cached_property
    def paper(self) -> Any:
        from pipeline.config import params  # imports torch, which takes seconds

        return params.load_paper()

    @cached_property
    def params(self) -> Any:
        """params.yaml, or None: an edit that is under way stops no import."""
        from pipeline.config import params

        with suppress(UserError):
            return params.load()
        return None

    @cached_property
    def settings(self) -> dict:
        """The content of params.yaml, {} where there is none."""
        return self.params.model_dump() if self.params else {}

    def configuration(self, variant: str) -> dict | None:
        """The configuration of a model as params.yaml has it; None where it has none, or an edit is under way."""
        from pipeline.config import params

        if self.params is None or variant not in self.params.variants:
            return None
        return params.resolve(self.params, variant).model_dump(mode="json")

    def search(self, families: Iterable[str] | None = None) -> dict[str, list[Entry]]:
        """Finds the runs of these families, or of all: by family, the newest first."""
        queries = [""]
        if families is not None and not any('"' in family for family in families):
            pairs = [family.split("/") for family in families]
            queries = [f'tags.study = "{study}" and tags.name = "{name}"' for study, name in pairs]
        found = defaultdict(list)
        for query in queries:
            for run in self.client.search_runs([self.id], query, 1, MOST_RUNS, ["attributes.start_time DESC"]):
                entry = Entry.of(run)
                if entry.name.count("/") in (1, 2):
                    found[entry.family].append(entry)
        return found

    def create(self, name: str, start: int, tags: dict[str, str], command: str = "") -> Entry:
        """Makes a run. Its title, note and colour, which is that of Figure 1, stay as somebody edits them."""
        title, note = notes.title(tags, self.settings), notes.note(tags, self.settings, self.paper)
        if command:
            title += f", seed {tags['seed']}"
            note += f"\n\nTo make it again: `{command}`."
        colour = look_of(tags["variant"], among=self.settings.get("variants", ())).colour
        tags = tags | {"run": name, "mlflow.note.content": note, "mlflow.runColor": GREY if colour == INK else colour}
        with suppress(KeyError, OSError):  # a user may have no name, as in a container
            tags["mlflow.user"] = getpass.getuser()
        info = self.client.create_run(self.id, start, tags, title).info
        return Entry(info.run_id, name, start, "RUNNING", tags, {}, {}, info.artifact_uri)

    def write(self, entry: Entry, values: list[Value], parameters: dict[str, str], tags: dict[str, str]) -> None:
        """Writes metrics, parameters, and last the tags that differ: what is cut short is written again."""
        from mlflow.entities import Metric, Param, RunTag

        if parameters and not entry.parameters:
            self._log_data(entry, parameters["data.source"])
        new = {key: value for key, value in tags.items() if entry.tags.get(key) != value}
        metrics = [Metric(*value) for value in values]
        listed = [Param(key, value) for key, value in parameters.items() if entry.parameters.get(key) != value]
        self.client.log_batch(entry.id, metrics, listed, [RunTag(key, value) for key, value in new.items()])
        entry.tags |= new
        entry.parameters |= parameters
        entry.metrics |= {key: value for key, value, *_ in sorted(values, key=lambda value: value[3])}

    def log_files(self, entry: Entry, folder: Path) -> None:
        """Copies the files of a folder to the artifacts. The client would read the whole run to learn where these lie."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        get_artifact_repository(entry.place, tracking_uri=self.client.tracking_uri).log_artifacts(str(folder))

    def end(self, entry: Entry, status: str, at: int) -> None:
        """Sets the status, and when the run ended."""
        if status == "RUNNING":
            self.client.update_run(entry.id, status)
        else:
            self.client.set_terminated(entry.id, status, at)
        entry.status = status

    def _log_data(self, entry: Entry, source: str) -> None:
        """Names the data that the run was trained on, which fills MLflow's column Dataset."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        data = Dataset(source, entry.tags["data_sha256"][:36], "local", source)  # MLflow takes 36 characters
        self.client.log_inputs(entry.id, [DatasetInput(data, [InputTag("mlflow.data.context", "training")])])

    def against_paper(self, tags: dict[str, str], accuracy: float) -> dict[str, float]:
        """The paper's accuracy and the difference to it, of its models in Table 2."""
        number = self.paper.table_2.get(tags["variant"]) if tags["study"] == TABLE_2 else None
        if number is None:
            return {}
        return {"paper": number, "difference_to_paper": round(accuracy - number, 2)}
