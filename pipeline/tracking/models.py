"""Logs the trained models of Table 2 in MLflow, and registers them by name."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.tracking.experiment import Experiment
from pipeline.tracking.trainings import TrackedTraining

if TYPE_CHECKING:
    from mlflow.entities import Run


def log(experiment: Experiment, run: "Run", training: TrackedTraining) -> str:
    """Logs a trained model in its MLflow run, and registers it. Returns the model's URI, or "" if the weights are missing.

    torch.export writes the model without pickle, and MLflow can load the file without this code. The slow export
    comes before the model is created in MLflow, so an interruption rarely leaves MLflow with a model that lacks files.

    Raises:
        UserError: the weights do not match the record.
    """
    if not training.run.weights.exists():
        return ""

    import mlflow.pytorch
    import torch
    from mlflow.entities import LoggedModelOutput, Metric
    from mlflow.models import infer_signature

    record = training.record
    model, data = training.run.load_model(record.config), record.config.data.images
    images = torch.zeros(2, data.channels, data.size, data.size)
    with torch.no_grad():
        signature = infer_signature(images.numpy(), model(images).numpy())
    values = training.values()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        mlflow.pytorch.save_model(
            model,
            path,
            serialization_format="pt2",
            input_example=images.numpy(),
            signature=signature,
            pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}"],
        )
        client, name, seed = experiment.client, record.name, record.seed
        for left in client.search_logged_models([experiment.id], f"source_run_id = '{run.info.run_id}'"):
            client.delete_logged_model(left.model_id)  # left by a killed import
        logged = client.create_logged_model(experiment.id, f"{name}-{seed}", run.info.run_id, params=run.data.params)
        try:
            client.log_model_artifacts(logged.model_id, str(path))
            last = [Metric(*value, model_id=logged.model_id) for value in values if value[-1] == values[-1][-1]]
            client.log_batch(run.info.run_id, last)
            client.log_outputs(run.info.run_id, [LoggedModelOutput(logged.model_id, step=values[-1][-1])])
            client.finalize_logged_model(logged.model_id, "READY")
        except BaseException:
            client.finalize_logged_model(logged.model_id, "FAILED")
            raise
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    # The model version stores the files' address rather than models:/ID, which MLflow would look up in the default store.
    place = logged.artifact_location
    client.create_model_version(name, place, run.info.run_id, {"seed": str(seed)}, model_id=logged.model_id)
    return f"models:/{logged.model_id}"
