"""Training by gradient: of edits that compute what taps do, on a frozen model in transformers; of small SAEs."""

from steercap.lab.training.comparing import compare_trained
from steercap.lab.training.datasets import DatasetTrained, ExampleFolder, TextLoss, TokenBudget, TrainedDatasets
from steercap.lab.training.examples import Example, Preference, Prompted
from steercap.lab.training.folder import Trained, Validation
from steercap.lab.training.hooked import HookedModel
from steercap.lab.training.objectives import OBJECTIVES, Objective
from steercap.lab.training.rates import RATES, train_datasets
from steercap.lab.training.sae import SAEScore, SAETraining, save_sae, score_sae, train_sae
from steercap.lab.training.settings import OPTIMIZERS, SCHEDULES, TrainingSettings
from steercap.lab.training.trainable import TrainableAdd, TrainableLowRank
from steercap.lab.training.training import losses_of, perplexity_of, train, train_many
from steercap.lab.training.vector_pairs import ComparedVectors, compare_vectors

__all__ = [
    "OBJECTIVES",
    "OPTIMIZERS",
    "RATES",
    "SCHEDULES",
    "ComparedVectors",
    "DatasetTrained",
    "Example",
    "ExampleFolder",
    "HookedModel",
    "Objective",
    "Preference",
    "Prompted",
    "SAEScore",
    "SAETraining",
    "TextLoss",
    "TokenBudget",
    "TrainableAdd",
    "TrainableLowRank",
    "Trained",
    "TrainedDatasets",
    "TrainingSettings",
    "Validation",
    "compare_trained",
    "compare_vectors",
    "losses_of",
    "perplexity_of",
    "save_sae",
    "score_sae",
    "train",
    "train_datasets",
    "train_many",
    "train_sae",
]
