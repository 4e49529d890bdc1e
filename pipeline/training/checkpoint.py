"""Where a training stands, in one file: a run that is killed and resumed ends with the bits of one that was not."""

import hashlib
import io
import pickle
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from pipeline.core import files, record
from pipeline.core.errors import UserError
from pipeline.training.loop import Progress, Training

UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError)  # of torch.load
DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass
class Times:
    """When a run was what, how long, and what was seen of it; no number of its results depends on it."""

    started_at: str = field(default_factory=record.now)
    timestamps: list[int] = field(default_factory=list)  # Unix milliseconds, one per point
    seconds: float = 0.0
    training_seconds: float = 0.0  # without the evaluations
    images: int = 0
    resumptions: int = 0
    watched: list[dict[str, float]] = field(default_factory=list)  # what the run's study sees at each point


def save(path: Path, training: Training, times: Times) -> None:
    """Writes model, optimisers, progress and times, behind the SHA-256 of their bytes: torch.load checks none."""
    state = {
        "model": training.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in training.optimizers],
        "progress": asdict(training.progress),
        "times": asdict(times),
    }
    content = as_bytes(state)
    files.write_bytes(path, hashlib.sha256(content).digest() + content)


def restore(path: Path, training: Training) -> Times | None:
    """Puts a training where `save` found it and returns its times; None where there is no checkpoint.

    Raises:
        UserError: the checkpoint cannot be read, or holds other bytes than were written.
    """
    try:
        digest, content = (written := path.read_bytes())[:DIGEST_BYTES], written[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            raise ValueError("not the bytes that were written")
        state = torch.load(io.BytesIO(content), map_location=training.device, weights_only=True)
        training.model.load_state_dict(state["model"])
        for optimizer, saved in zip(training.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        training.progress = Progress(**state["progress"])
        return Times(**state["times"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UNREADABLE:
        raise UserError(f"the checkpoint {path} cannot be read: delete it to train from the start.") from None


def as_bytes(state: dict) -> bytes:
    """torch.save writes a file's own name into it; through memory the bytes depend on the state alone."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
