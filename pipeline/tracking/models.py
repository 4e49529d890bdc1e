"""The trained models of Table 2 as MLflow's models, and registered by name."""

from typing import Any

import torch

from pipeline.core import params
from pipeline.core.params import RunConfig
from pipeline.tracking.records import Training
from pipeline.training.run import TABLE_2


def log(training: Training, run: Any, client: Any) -> str:
    """Logs a trained model with its MLflow run as torch.export has it: no pickle, and loaded without this code.

    Returns its address.
    """
    import mlflow.pytorch
    from mlflow.models import Model, infer_signature

    config = params.validate(RunConfig, params.written_config(training.record["config"]), str(training.path))
    model, data = training.run.load_model(config), config.data.images
    images = torch.zeros(2, data.channels, data.size, data.size)
    with torch.no_grad():
        signature = infer_signature(images.numpy(), model(images).numpy())
    options = {"serialization_format": "pt2", "input_example": images.numpy(), "signature": signature}
    options |= {"pip_requirements": [f"torch=={torch.__version__.partition('+')[0]}"]}
    options |= {"validate_serving_input": False}  # which loads it again
    made = client.create_logged_model(run.info.experiment_id, "model", run.info.run_id, params=run.data.params)
    where = {"model_id": made.model_id, "run_id": run.info.run_id, "step": training.values()[-1][-1]}
    Model.log(None, mlflow.pytorch, pytorch_model=model, **where, **options)
    return f"models:/{made.model_id}"


def register(client: Any, newest: list) -> None:
    """Registers the models of these MLflow runs as osa_qr and so on, a version for each seed."""
    names = {model.name for model in client.search_registered_models()}
    known = {version.run_id for version in client.search_model_versions()}
    for run in newest:
        study, name, seed = run.data.params["run"].split("/")
        if study == TABLE_2 and "model" in run.data.tags and run.info.run_id not in known:
            if name not in names:
                client.create_registered_model(name)
            names.add(name)
            client.create_model_version(name, run.data.tags["model"], run.info.run_id, {"seed": seed})
