"""Accuracy of the classifier of a trait's example sentences, on sentences that it was not fitted to."""

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from steercap.lab.measures.scores import Trait
from steercap.lab.measures.scores.minilm import C, embed


def cross_validated(trait: Trait) -> float:
    """Area under the ROC curve of example sentences, each scored by a classifier without its pair: 0.5 is chance.

    Each pair of examples is left out in turn, and their scores are pooled.
    """
    pairs = len(trait.examples.positive)
    rows, kinds = embed([*trait.examples.positive, *trait.examples.negative]), np.repeat([1, 0], pairs)
    chances = np.empty(2 * pairs)
    for pair in range(pairs):
        seen = np.arange(2 * pairs) % pairs != pair
        fitted = LogisticRegression(C=C, max_iter=1000).fit(rows[seen], kinds[seen])
        chances[~seen] = fitted.predict_proba(rows[~seen])[:, 1]
    return float(roc_auc_score(kinds, chances))
