"""What the bounds share: which there are, and a check that `_validate` has not."""

import numpy as np

BOUNDS = ("paper", "sharp")


def nonnegative(name, value):
    array = np.asarray(value, float)
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
    return array
