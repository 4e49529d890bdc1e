"""Checks whether the working tree and a commit give bit-identical trained weights: `python -m pipeline same_bits COMMIT`.

The command trains every model with both versions of the code for a few steps on the sample of MNIST, on this machine. If an
edit changes the weights, increment `osa.NUMERICS`; DVC then trains the models again.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import osa.models
from pipeline.config import params
from pipeline.core import git
from pipeline.core.errors import UserError, command_parser, entry_point
from pipeline.core.files import ROOT
from pipeline.data import idx
from pipeline.training.loop import Training, configure_torch

STEPS, BATCH = 20, 16


@entry_point
def main() -> None:
    parser = command_parser("same_bits", __doc__)
    parser.add_argument("commit")
    commit = parser.parse_args().commit
    if not idx.folder("sample").exists():
        raise UserError("data/sample is missing: run `python -m pipeline fetch sample`.")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        git.run("worktree", "add", "--detach", str(tree), commit, folder=ROOT)
        try:
            (tree / "data").symlink_to(Path("data").resolve())
            here, there = model_digests(ROOT), model_digests(tree)
        finally:
            git.run("worktree", "remove", "--force", str(tree), folder=ROOT)
    other = [name for name in here if name in there and here[name] != there[name]]
    compared = len(here.keys() & there.keys())
    print(f"{compared} models compared with {commit} after {STEPS} steps; not bit-identical: {', '.join(other) or 'none'}")
    sys.exit(bool(other))


def model_digests(tree: Path) -> dict[str, str]:
    """Trains each model with the code and parameters in `tree`. Returns the digest of each model's weights."""
    command = [sys.executable, "-m", "pipeline.tools.same_bits", "--print"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, check=True, encoding="utf-8", stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def first_losses(name: str, steps: int = STEPS) -> tuple[list[float], str]:
    """Trains a model on data/sample for `steps` steps with seed 0. Returns the losses and the final weights' SHA-256."""
    config = params.resolve_recipe(params.load(), params.load_paper(), name, {"train": {"batch_size": BATCH}})
    config = config.model_copy(update={"data": config.data.model_copy(update={"source": "sample"})})
    training, losses = Training(config, 0, torch.device("cpu")), []
    for images, labels in training.batches(0):
        losses.append(training.step(images, labels)[0].item())
        if len(losses) == steps:
            break
    digest = hashlib.sha256()
    for parameter in training.model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return losses, digest.hexdigest()


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:  # only `model_digests` uses this option
        configure_torch()
        print(json.dumps({name: first_losses(name)[1] for name in osa.models.MODELS}))
    else:
        main()
