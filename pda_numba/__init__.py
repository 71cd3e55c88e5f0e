"""Attention over very long sequences for NumPy: linear time, a measured error, no PyTorch."""

from .api import attention, estimate_error
from .info import AccuracyWarning, AttentionInfo, ErrorEstimate
from .plan import Plan, plan
from .project import project, projection_matrix, projection_pair

__version__ = "0.1.0"

__all__ = [
    "AccuracyWarning",
    "AttentionInfo",
    "ErrorEstimate",
    "Plan",
    "attention",
    "estimate_error",
    "plan",
    "project",
    "projection_matrix",
    "projection_pair",
]
