"""Evaluation: methods beside each other on the same questions, with intervals, and with what they cost."""

from steercap.evaluation.definition import Condition, Evaluation
from steercap.evaluation.methods import Method, shuffled
from steercap.evaluation.results import EvaluationResults
from steercap.evaluation.running import evaluate, read_results
from steercap.evaluation.statistics import Difference, Estimate, benjamini_hochberg, holm
from steercap.evaluation.summaries import Comparison, Drift, Line, Matched, corrected
from steercap.evaluation.tasks import TASKS
from steercap.evaluation.tasks.base import Item, Task
from steercap.evaluation.tasks.choices import Choice, Choices
from steercap.evaluation.tasks.passages import Passages

__all__ = [
    "TASKS",
    "Choice",
    "Choices",
    "Comparison",
    "Condition",
    "Difference",
    "Drift",
    "Estimate",
    "Evaluation",
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
