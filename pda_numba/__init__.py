"""Attention over very long sequences for NumPy: linear time, a measured error, no PyTorch."""

from . import theory
from .api import attention, estimate_error
from .decode import AttentionCache
from .factorize import factorize
from .factors import AttentionFactors
from .gradient import Residuals, attention_backward, attention_forward, attention_vjp
from .info import AccuracyWarning, AttentionInfo, DecodeInfo, ErrorEstimate, GradientInfo
from .options import NearField
from .plan import Plan, plan
from .prefill import prefill
from .project import project, projection_matrix, projection_pair
from .spectrum import Spectrum, spectrum

__version__ = "0.1.0"

__all__ = [
    "AccuracyWarning",
    "AttentionCache",
    "AttentionFactors",
    "AttentionInfo",
    "DecodeInfo",
    "ErrorEstimate",
    "GradientInfo",
    "NearField",
    "Plan",
    "Residuals",
    "Spectrum",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_vjp",
    "estimate_error",
    "factorize",
    "plan",
    "prefill",
    "project",
    "projection_matrix",
    "projection_pair",
    "spectrum",
    "theory",
]
