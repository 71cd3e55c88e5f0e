"""What a decoder's audits say of the answers it has given: a running error with a 95 % limit, per head, on the host.

Of n answers, u are the model's; the others are exact. Audits, drawn without a look at the query, compare the model's
answer with the exact one: y = |out - o|^2. With m the mean, s^2 the variance and y_max the largest of K such squares,

    error = sqrt(u m / sum |out|^2)

and its limit takes the sum of the u errors for gamma distributed with mean u m + p and variance u (1 + u/K) s^2 + p^2,
p = max(1, u/K) y_max being a pseudo-row as in `certify`. The recent queries that were held out of the fit stand for
audits that are yet to come: of H such rows the share 1 - a/H counts after a audits.
"""

import numpy as np

from .certify import Z95, share_of_rows

AHEAD = 64  # a statement that decides whether to go on looks at no fewer answers


class Ledger:
    """The account of some heads since each one's last fit, and of all that was closed before."""

    answers: np.ndarray  # answers given
    guessed: np.ndarray  # those that are the model's
    size: np.ndarray  # sum of |out|^2
    slip: np.ndarray  # sum of the squared errors that rounding alone may have caused
    audits: np.ndarray
    total: np.ndarray  # of the audits' squared errors: their sum, the sum of their squares, the largest
    squares: np.ndarray
    worst: np.ndarray
    prior: np.ndarray  # the same for the rows that were held out of the fit
    prior_total: np.ndarray
    prior_squares: np.ndarray
    prior_worst: np.ndarray

    def __init__(self, heads):
        for name in self.__annotations__:
            setattr(self, name, np.zeros(heads))
        self.closed_square, self.closed_limit, self.closed_size = (np.zeros(heads) for _ in range(3))

    def open(self, head, errors):
        """Begin anew for one head, after a fit that made these squared errors on rows held out of it."""
        error, limit, size = self._sums(self.guessed, self.size)
        self.closed_square[head] += error[head] + self.slip[head]
        self.closed_limit[head] += limit[head] + self.slip[head]
        self.closed_size[head] += size[head]
        for name in self.__annotations__:
            getattr(self, name)[head] = 0
        self.prior[head], self.prior_worst[head] = len(errors), errors.max(initial=0)
        self.prior_total[head], self.prior_squares[head] = errors.sum(), np.square(errors).sum()

    def audit(self, drawn, errors):
        """Squared errors (heads, T) of the model, where an audit is `drawn`."""
        errors = np.where(drawn, errors, 0)
        self.audits += drawn.sum(axis=1)
        self.total += errors.sum(axis=1)
        self.squares += np.square(errors).sum(axis=1)
        self.worst = np.maximum(self.worst, errors.max(axis=1, initial=0))

    def answer(self, exact, sizes, slips):
        """Answers (heads, T): which are exact, their |out|^2, and what rounding may have made of each."""
        self.answers += exact.shape[1]
        self.guessed += (~exact).sum(axis=1)
        self.size += sizes.sum(axis=1)
        self.slip += slips.sum(axis=1)

    def outlook(self, guesses, size):
        """The limit if so many more answers of this mean size were the model's: at least `AHEAD` of them in all."""
        more = np.maximum(guesses, AHEAD - self.guessed)
        _, limit, size = self._sums(self.guessed + more, self.size + more * size)
        return np.sqrt(limit / np.maximum(size, 1e-300))

    def statement(self):
        """error, error_limit, row_error, row_share, audits, since each head's last fit."""
        error, limit, size = self._sums(self.guessed, self.size)
        size = np.maximum(size, 1e-300)
        count, _, _, worst = self._sample()
        row = np.where(self.guessed > 0, np.sqrt(worst * self.answers / size), np.sqrt(self.slip / size))
        share = np.where(self.guessed > 0, [share_of_rows(k) for k in count], 1.0)
        error, limit = np.sqrt((error + self.slip) / size), np.sqrt((limit + self.slip) / size)
        return error, limit, row, share, self.audits.astype(int)

    def overall(self):
        """error and error_limit of all answers ever given."""
        error, limit, size = self._sums(self.guessed, self.size)
        size = np.maximum(size + self.closed_size, 1e-300)
        error, limit = error + self.slip + self.closed_square, limit + self.slip + self.closed_limit
        return np.sqrt(error / size), np.sqrt(limit / size)

    def _sample(self):
        """How many squared errors are known, their mean, variance and largest."""
        weight = np.clip(1 - self.audits / np.maximum(self.prior, 1), 0, 1) * (self.prior > 0)
        count = self.audits + weight * self.prior
        known = np.maximum(count, 1)
        mean = (self.total + weight * self.prior_total) / known
        variance = np.maximum((self.squares + weight * self.prior_squares) / known - mean**2, 0)
        return count, mean, variance, np.maximum(self.worst, np.where(weight > 0, self.prior_worst, 0))

    def _sums(self, guessed, size):
        """Sum of the squared errors of so many guesses, its limit, and the size it is relative to."""
        count, mean, variance, worst = self._sample()
        expand = guessed / np.maximum(count, 1)
        pseudo = np.maximum(expand, 1) * worst
        spread = guessed * (1 + expand) * variance + pseudo**2
        limit = _gamma_limits(guessed * mean + pseudo, spread)
        return guessed * mean, np.where(guessed > 0, limit, 0), size


def _gamma_limits(mean, variance):
    """95 % quantiles of gamma distributions with these means and variances (see `certify`)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shape = mean * mean / variance
        factor = np.maximum(1 - 1 / (9 * shape) + Z95 / (3 * np.sqrt(shape)), 0) ** 3
    return np.where(variance > 0, mean * factor, mean)
