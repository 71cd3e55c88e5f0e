"""The bounds of the paper on Projection-Decomposition Attention, and what is left of them, as functions.

    Theorem 1    projected logits             `projection_tail`, `projection_dim`, `projection_factor`
    Theorem 2    a factorisation of rank R    `decomposition_bound`, `rank_bound`, `decomposition_error`
    Lemma 2.1    decay of singular values     `decay_hypothesis`, refuted by `permutation_attention`
    Theorem 3    error of the output          `output_error_bound`, `logit_error_bound`, `logit_spread_bound`
    Theorem 6    variance of gradients        `gradient_variance_hypothesis`, `projection_gradient_variance`
    Theorem 7    convergence of training      `training_hypothesis`, `training_bound`
    3.3          operations and memory        `cost`

With ``bound="paper"`` a function returns what the paper states, otherwise what holds. The documentation's page on
theory says which statement is confirmed, refuted or corrected, and which test shows it.
"""

from .cost import Cost, Count, cost
from .decomposition import decay_hypothesis, decomposition_bound, decomposition_error, permutation_attention, rank_bound
from .output import logit_error_bound, logit_spread_bound, output_error_bound
from .projection import projection_dim, projection_factor, projection_tail
from .training import gradient_variance_hypothesis, projection_gradient_variance, training_bound, training_hypothesis

__all__ = [
    "Cost",
    "Count",
    "cost",
    "decay_hypothesis",
    "decomposition_bound",
    "decomposition_error",
    "gradient_variance_hypothesis",
    "logit_error_bound",
    "logit_spread_bound",
    "output_error_bound",
    "permutation_attention",
    "projection_dim",
    "projection_factor",
    "projection_gradient_variance",
    "projection_tail",
    "rank_bound",
    "training_bound",
    "training_hypothesis",
]
