"""What a decoder's audits say of the answers it has given: a running error with a 95 % limit, per head, on the host.

Some answers are the model's, the others exact. What the model is off by, y_i = |out_i - o_i|^2, goes roughly with the
query's leverage, which is known of every answer. So every answer has a load, half of it constant,

    x_i = (1 + leverage_i / mean leverage of the held-out queries) / 2

and an audit compares the model's answer with the exact one with chance p_i ~ x_i. An audit stands for its weight
w_i = (1 - p_i)/p_i of the model's answers. With the ratio r = sum w y / sum w x, X the sum of x over the model's
answers, and K = (sum w x)^2 / sum (w x)^2,

    error = sqrt(X r / sum |out|^2)

The limit takes the sum of the errors for gamma distributed with mean X r + P and variance (X2 + X^2/K) s^2 + P^2: X2
is the sum of x^2, s^2 the variance of y/x, and P = max(X/K, X2/X) max(y/x) a pseudo-row as in `certify`. The recent
queries that were held out of the fit count as `PRIOR` audits until there are audits; after `FADE` of them all that is
left is the largest of their y/x. The queries to come resemble those that go before less than these resemble each other,
so they may not count for as many as they are. Whether to go on is judged a little less strictly, by `OUTLOOK` of them:
else no model would live to its audits.
"""

import numpy as np

from .certify import Z95, share_of_rows

PRIOR, OUTLOOK, FADE = 8.0, 32.0, 24.0
AHEAD = 64  # a statement that decides whether to go on looks at no fewer answers
EVEN = 0.5  # the constant part of the loads
_LEAST = 1e-300


class Ledger:
    """The account of some heads since each one's last fit, and of all that was closed before."""

    answers: np.ndarray  # answers given
    size: np.ndarray  # sum of |out|^2
    slip: np.ndarray  # sum of the squared errors that rounding alone may have caused
    load: np.ndarray  # of the model's answers: X and X2
    load_square: np.ndarray
    audits: np.ndarray
    even_audits: np.ndarray  # those that were drawn as likely as any other answer's
    weight: np.ndarray  # of the audits: the sums of w x, (w x)^2, w y and w y^2/x
    weight_square: np.ndarray
    total: np.ndarray
    squares: np.ndarray
    worst: np.ndarray  # the largest y, and y/x
    worst_ratio: np.ndarray
    expected: np.ndarray  # of the held-out queries: mean |out|^2 and leverage; r, sum y^2/x over sum x, max y/x
    typical: np.ndarray
    prior: np.ndarray
    prior_squares: np.ndarray
    prior_ratio: np.ndarray

    def __init__(self, heads):
        for name in self.__annotations__:
            setattr(self, name, np.zeros(heads))
        self.closed_square, self.closed_limit, self.closed_size = (np.zeros(heads) for _ in range(3))

    def open(self, head, errors, leverage, size):
        """Begin anew for one head, after a fit that made these squared errors on the queries held out of it.

        `size` is their mean |out|^2.
        """
        square, limit = self._sums(self.load, self.load_square)
        self.closed_square[head] += square[head] + self.slip[head]
        self.closed_limit[head] += limit[head] + self.slip[head]
        self.closed_size[head] += self.size[head]
        for name in self.__annotations__:
            getattr(self, name)[head] = 0
        self.expected[head] = size
        if len(errors):
            self.typical[head] = leverage.mean()
            load = self.loads(np.broadcast_to(leverage, (len(self.typical), len(leverage))))[head]
            self.prior[head] = errors.sum() / load.sum()
            self.prior_squares[head] = (np.square(errors) / load).sum() / load.sum()
            self.worst[head], self.prior_ratio[head] = errors.max(), (errors / load).max()

    def loads(self, leverage):
        """x of answers with this leverage (heads, T)."""
        relative = leverage / np.maximum(self.typical, _LEAST)[:, None]
        return EVEN + (1 - EVEN) * np.minimum(relative, 1e6)

    def audit(self, drawn, even, errors, loads, chance):
        """Squared errors (heads, T) of the model, where an audit was `drawn` with this chance."""
        errors = np.where(drawn, errors, 0)
        weight = np.where(drawn, 1 / np.maximum(chance, _LEAST) - 1, 0)
        self.audits += drawn.sum(axis=1)
        self.even_audits += (drawn & even).sum(axis=1)
        self.weight += (weight * loads).sum(axis=1)
        self.weight_square += np.square(weight * loads).sum(axis=1)
        self.total += (weight * errors).sum(axis=1)
        self.squares += (weight * np.square(errors) / loads).sum(axis=1)
        self.worst = np.maximum(self.worst, errors.max(axis=1))
        self.worst_ratio = np.maximum(self.worst_ratio, (errors / loads).max(axis=1))

    def answer(self, sizes, slips, loads=None):
        """Answers (heads, T): |out|^2, what rounding may have made of each, and loads, 0 where they are exact."""
        self.answers += sizes.shape[1]
        self.size += sizes.sum(axis=1)
        self.slip += slips.sum(axis=1)
        if loads is not None:
            self.load += loads.sum(axis=1)
            self.load_square += np.square(loads).sum(axis=1)

    def outlook(self, loads, sizes):
        """The limit if the model gave answers of these loads and |out|^2 (heads, T) too: at least `AHEAD` in all."""
        more, square = loads.sum(axis=1), np.square(loads).sum(axis=1)
        rest = np.maximum(AHEAD - self.load - more, 0)
        _, limit = self._sums(self.load + more + rest, self.load_square + square + rest, OUTLOOK)
        left = np.maximum(AHEAD - self.answers - loads.shape[1], 0)
        size = self.size + sizes.sum(axis=1) + left * self.expected
        return np.sqrt(limit / np.maximum(size, _LEAST))

    def statement(self):
        """error, error_limit, row_error, row_share, audits, since each head's last fit."""
        square, limit = self._sums(self.load, self.load_square)
        size, guessed = np.maximum(self.size, _LEAST), self.load > 0
        row = np.sqrt((np.where(guessed, self.worst * self.answers, 0) + self.slip) / size)
        counts = zip(self.even_audits, guessed, strict=True)
        share = np.array([share_of_rows(k) if some else 1.0 for k, some in counts])
        error, limit = np.sqrt((square + self.slip) / size), np.sqrt((limit + self.slip) / size)
        return error, limit, row, share, self.audits.astype(int)

    def overall(self):
        """error and error_limit of all answers ever given."""
        square, limit = self._sums(self.load, self.load_square)
        size = np.maximum(self.size + self.closed_size, _LEAST)
        square, limit = square + self.slip + self.closed_square, limit + self.slip + self.closed_limit
        return np.sqrt(square / size), np.sqrt(limit / size)

    def _sums(self, load, load_square, prior=PRIOR):
        """The sum of the squared errors of answers with these loads, and its limit."""
        known = self.weight**2 / np.maximum(self.weight_square, _LEAST)
        prior = prior * np.clip(1 - self.audits / FADE, 0, 1)
        count, weight = np.maximum(known + prior, _LEAST), np.maximum(self.weight, _LEAST)
        ratio = (known * self.total / weight + prior * self.prior) / count
        square = (known * self.squares / weight + prior * self.prior_squares) / count
        variance = np.maximum(square - ratio**2, 0)
        several = np.maximum(load / np.maximum(count, 1), load_square / np.maximum(load, _LEAST))
        pseudo = several * np.maximum(self.worst_ratio, self.prior_ratio)
        spread = (load_square + load**2 / np.maximum(count, 1)) * variance + pseudo**2
        return load * ratio, np.where(load > 0, _gamma_limits(load * ratio + pseudo, spread), 0)


def _gamma_limits(mean, variance):
    """95 % quantiles of gamma distributions with these means and variances (see `certify`)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shape = mean * mean / variance
        factor = np.maximum(1 - 1 / (9 * shape) + Z95 / (3 * np.sqrt(shape)), 0) ** 3
    return np.where(variance > 0, mean * factor, mean)
