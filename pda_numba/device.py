"""Where a call runs."""


def resolve_device(device):
    """(device, reason) for the caller's wish: "auto", "cpu" or "cuda".

    This release has CPU drivers only, so "cuda" is an error that says so, and "auto" names its reason.
    """
    if not isinstance(device, str):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    if device == "cpu":
        return "cpu", "asked for"
    if device == "auto":
        return "cpu", "auto: this release runs on the CPU"
    if device == "cuda":
        raise RuntimeError("device='cuda': this release of pda_numba has no GPU kernels; use device='cpu' or 'auto'")
    raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
