"""Training of vectors by gradient: edits with the semantics of taps, on a frozen model in transformers."""

from steercap.lab.training.examples import Example, Preference, Prompted
from steercap.lab.training.folder import Trained, Validation
from steercap.lab.training.hooked import HookedModel
from steercap.lab.training.objectives import OBJECTIVES, Objective
from steercap.lab.training.settings import TrainingSettings
from steercap.lab.training.trainable import TrainableAdd, TrainableLowRank
from steercap.lab.training.training import losses_of, train, train_many

__all__ = [
    "OBJECTIVES",
    "Example",
    "HookedModel",
    "Objective",
    "Preference",
    "Prompted",
    "TrainableAdd",
    "TrainableLowRank",
    "Trained",
    "TrainingSettings",
    "Validation",
    "losses_of",
    "train",
    "train_many",
]
