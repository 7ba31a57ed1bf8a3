"""Evaluation: comparison of steering methods and prompts on the same questions, with intervals and costs."""

from steercap.lab.measures.statistics import Difference, Estimate, benjamini_hochberg, holm
from steercap.lab.studies.evaluation.definition import Evaluation, EvaluationCondition
from steercap.lab.studies.evaluation.methods import Method, shuffled
from steercap.lab.studies.evaluation.results import EvaluationResults
from steercap.lab.studies.evaluation.running import evaluate, read_results
from steercap.lab.studies.evaluation.tables import Comparison, Drift, Line, Matched, corrected
from steercap.lab.studies.evaluation.tasks import TASKS, Choice, Choices, Item, Passages, Task

__all__ = [
    "TASKS",
    "Choice",
    "Choices",
    "Comparison",
    "Difference",
    "Drift",
    "Estimate",
    "Evaluation",
    "EvaluationCondition",
    "EvaluationResults",
    "Item",
    "Line",
    "Matched",
    "Method",
    "Passages",
    "Task",
    "benjamini_hochberg",
    "corrected",
    "evaluate",
    "holm",
    "read_results",
    "shuffled",
]
