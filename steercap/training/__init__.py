"""Vectors by gradient: an edit is trained as taps apply it, the model frozen, in transformers."""

from steercap.training.examples import Example, Preference, Prompted
from steercap.training.hooked import HookedModel
from steercap.training.objectives import OBJECTIVES
from steercap.training.objectives.base import Objective
from steercap.training.results import Trained, Validation
from steercap.training.settings import TrainingSettings
from steercap.training.starts import TrainableAdd, TrainableLowRank
from steercap.training.training import losses_of, train, train_many

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
