"""Finds, creates and updates the runs of this project's experiment in MLflow."""

import getpass
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.config import params
from pipeline.config.looks import INK, look_of
from pipeline.core.errors import UserError
from pipeline.tracking import store
from pipeline.tracking.trainings import Value
from pipeline.tracking.views import views
from pipeline.training.run import TABLE_2

if TYPE_CHECKING:
    from mlflow.entities import Run

NAME = "Orthogonal Self-Attention"
NOTE = """\
The Views menu, at the top right of the table, has one view of the models and one of their seeds.

Accuracies are in per cent, differences in points. `OSA (QR)` is the mean over the seeds that start to learn,
`OSA (QR), seed 0` is one run, and `ViT, init.head=zeros` is ViT with this value of `init.head`. Parameters are named as in
`params.yaml`; the tag `run` is the folder under `paper_outputs/runs`.
"""
GREY = "#808080"  # instead of INK, which is invisible in MLflow's dark scheme
MOST_RUNS = 50_000  # MLflow's limit on the number of search results


def name_of(run: "Run") -> str:
    """Returns a run's name: table_2/osa_qr/0, table_2/osa_qr for an MLflow parent run, or "" for a run added by the user."""
    return run.data.tags.get("run") or run.data.params.get("run", "")  # older stores have the name as a parameter


class Experiment:
    """The experiment in MLflow. The constructor creates the experiment and its views if they do not exist."""

    def __init__(self, client: Any) -> None:
        self.client = client
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or NAME
        if (present := client.get_experiment_by_name(name)) is None:
            tags = {"mlflow.note.content": NOTE, "mlflow.experimentKind": "custom_model_development"}
            present = client.get_experiment(client.create_experiment(name, store.artifacts(), tags))
        elif present.lifecycle_stage == "deleted":
            client.restore_experiment(present.experiment_id)
        store.move_along(present.artifact_location)
        self.id = present.experiment_id
        for key, view in views().items():
            if present.tags.get(f"mlflow.sharedViewState.{key}") != view:
                client.set_experiment_tag(self.id, f"mlflow.sharedViewState.{key}", view)

    @cached_property
    def params(self) -> Any:
        """The content of params.yaml. None if the file is invalid, since an unfinished edit must not prevent a sync."""
        with suppress(UserError):
            return params.load()
        return None

    @cached_property
    def paper(self) -> Any:
        return params.load_paper()

    def search(self, families: Iterable[str] | None = None) -> dict[str, list["Run"]]:
        """Returns the runs of each family, such as table_2/osa_qr, newest run first. By default, searches all families."""
        queries = [""]
        if families is not None:
            pairs = [family.split("/") for family in families]
            queries = [f'tags.study = "{study}" and tags.name = "{name}"' for study, name in pairs]
        found = defaultdict(list)
        for query in queries:
            for run in self.client.search_runs([self.id], query, 1, MOST_RUNS, ["attributes.start_time DESC"]):
                parts = name_of(run).split("/")
                if len(parts) in (2, 3):
                    found["/".join(parts[:2])].append(run)
        return found

    def create(self, name: str, start: int, tags: dict[str, str]) -> "Run":
        """Creates a run, and sets its title and its colour (the model's colour in Figure 1). Later syncs change neither."""
        colour = look_of(tags["variant"], among=self.params.variants if self.params else ()).colour
        tags = tags | {"run": name, "mlflow.runColor": GREY if colour == INK else colour}
        with suppress(KeyError, OSError):  # the user of a container may have no name
            tags["mlflow.user"] = getpass.getuser()
        return self.client.create_run(self.id, start, tags, self._title(tags))

    def _title(self, tags: dict[str, str]) -> str:
        """Returns the title of a run: "OSA (QR), seed 0", "ViT, init.head=zeros" or, in the study `depth`, "ViT, depth"."""
        variant, study = tags["variant"], tags["study"]
        label = self.params.label(variant) if self.params else variant
        replaced = re.split(r"\+(?=[a-z])", tags["name"].removeprefix(variant))[1:]
        if not replaced and study != TABLE_2:
            replaced = [study]
        seed = [f"seed {tags['seed']}"] if "seed" in tags else []
        return ", ".join([label, *replaced, *seed])

    def write(
        self, run: "Run", tags: Mapping[str, str], values: Sequence[Value] = (), parameters: Mapping[str, str] | None = None
    ) -> None:
        """Writes metrics, then changed parameters, then changed tags. Tags mark a run as up to date, so they come last."""
        from mlflow.entities import Metric, Param, RunTag

        parameters = parameters or {}
        if parameters and not run.data.params:
            self._log_data(run, parameters["data.source"])
        new_tags = [RunTag(key, value) for key, value in tags.items() if run.data.tags.get(key) != value]
        new = [Param(key, value) for key, value in parameters.items() if run.data.params.get(key) != value]
        if new_tags or new or values:
            self.client.log_batch(run.info.run_id, [Metric(*value) for value in values], new, new_tags)

    def _log_data(self, run: "Run", source: str) -> None:
        """Logs the name and digest of the run's data set, which MLflow shows in the Dataset column."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        data = Dataset(source, run.data.tags["data_sha256"][:36], "local", source)  # MLflow limits a digest to 36 characters
        self.client.log_inputs(run.info.run_id, [DatasetInput(data, [InputTag("mlflow.data.context", "training")])])

    def end(self, run: "Run", status: str, at: int) -> None:
        if status == "RUNNING":
            self.client.update_run(run.info.run_id, status)
        else:
            self.client.set_terminated(run.info.run_id, status, at)
