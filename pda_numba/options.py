"""The caller's choices, checked, and which near fields there are to choose from."""

from dataclasses import dataclass
from typing import NamedTuple

from ._validate import choice, flag, positive, whole

WINDOWS = (32, 128)  # half widths that "auto" chooses from
PROBES = (4, 8, 16)  # numbers of buckets that "auto" chooses from
_MANY_KEYS = 8192
_KINDS = ("auto", "none", "window", "content", "both")


@dataclass(frozen=True)
class NearField:
    """A near field of the caller's: keys that are attended to exactly beside the low-rank far field.

    Attributes
    ----------
    window : int, default 0
        Keys with |i - j| <= window; 0 is none.
    n_probes : int, default 8
        Buckets of similar keys that every query attends to, those of the largest score; 0 is none, at most 16.
    bucket_size : int, default 32
        Keys of a bucket on average; none holds more than one and a half times as many.
    n_heavy : int, default 16
        Keys that hold the most attention of the pilot rows, near to every query, if there are probes.
    """

    window: int = 0
    n_probes: int = 8
    bucket_size: int = 32
    n_heavy: int = 16


class Fields(NamedTuple):
    """What may be chosen, for every head by itself."""

    windows: tuple  # half widths, rising; 0 is none
    probes: tuple  # numbers of probes, rising; 0 is no content near field
    both: bool  # may a head have a window and probes?
    size: int = 0  # of a bucket; 0: by the number of keys
    heavy: int = 16

    def size_for(self, m):
        """Keys of a bucket on average, out of m. Large ones take less time a key, small ones hold what is alike."""
        return self.size or (64 if m >= _MANY_KEYS else 32)

    def without_windows(self):
        return self._replace(windows=(0,), both=False)

    def pairs(self):
        """(window, probes) of every choice: the windows alone, then those with probes."""
        pairs = [(w, 0) for w in self.windows if 0 in self.probes]
        for p in filter(None, self.probes):
            pairs += [(w, p) for w in self.windows if w <= WINDOWS[0] and (self.both or not w)] or [
                (self.windows[0], p)
            ]
        if 0 in self.probes and self.both:  # a window beside only one number of probes: each choice costs a trial
            pairs = [(w, p) for w, p in pairs if not w or p in (0, PROBES[1])]
        return pairs


def fields(window, near, n, m):
    """The `Fields` for a caller's `window` and `near`, of N queries and M keys."""
    length = max(n, m)
    if not isinstance(near, NearField):
        if not isinstance(near, str):
            raise TypeError(f"near must be a word or a NearField, got {near!r} of type {type(near).__name__}")
        choice("near", near, _KINDS)
    fixed = None if isinstance(window, str) and window == "auto" else _width("window", window, length)
    if fixed is not None and (isinstance(near, NearField) or near in ("none", "content")):
        raise ValueError(f"window must be 'auto' beside near={near!r}, got {window!r}")
    if isinstance(near, NearField):
        return _own(near, length)
    widths = tuple(w for w in WINDOWS if w < n) if n == m or near in ("window", "both") else ()
    if fixed is not None:
        if near == "both":
            return Fields((fixed,), PROBES, True)
        return Fields((fixed,), (0,), False)
    return {
        "auto": Fields((0, *widths), (0, *PROBES), True),
        "none": Fields((0,), (0,), False),
        "window": Fields(widths or (0,), (0,), False),
        "content": Fields((0,), PROBES, False),
        "both": Fields(widths or (0,), PROBES, True),
    }[near]


def _own(near, length):
    window = _width("near.window", near.window, length)
    probes = whole("near.n_probes", near.n_probes, 0, 16)
    size = whole("near.bucket_size", near.bucket_size, 8, 1024)
    heavy = whole("near.n_heavy", near.n_heavy, 0, 256)
    return Fields((window,), (probes,), bool(window), size, heavy)


def _width(name, window, length):
    if isinstance(window, str):
        raise ValueError(f"{name} must be 'auto' or an integer, got {window!r}")
    high = max(length - 1, 0)
    return whole(name, window, 0, high, high_name=f"the sequence length less one, {length - 1}")


@dataclass(frozen=True)
class Options:
    """The caller's choices, checked. `proj_dim` None is no projection."""

    rank: int | None
    tol: float | None
    near: Fields
    proj_dim: int | None
    projection: str
    calibrate: bool
    method: str


def options(rank, tol, window, near, proj_dim, method, projection="pca", calibrate=True, *, n, m, d):
    """Check the choices that do not depend on the arrays' values, against N, M and D."""
    return Options(
        rank=None if rank is None else whole("rank", rank, 1),
        tol=None if tol is None else positive("tol", tol),
        near=fields(window, near, n, m),
        proj_dim=None if proj_dim is None else whole("proj_dim", proj_dim, 1, d, high_name=f"the head dimension {d}"),
        projection=choice("projection", projection, ("pca", "srht", "gaussian", "orthogonal")),
        calibrate=flag("calibrate", calibrate),
        method=choice("method", method, ("auto", "pda", "exact")),
    )
