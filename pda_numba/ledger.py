"""What a decoder's audits say of the answers it has given: a running error with a 95 % limit, per head, on the host.

Of the answers u are the model's; the others are exact. Audits, drawn with chance p_i without a look at the query,
compare the model's answer with the exact one: y_i = |out_i - o_i|^2. They weigh w_i = (1 - p_i)/p_i each, as many as
the model's answers they stand for. With m and s^2 the weighted mean and variance, y_max the largest of these squares
and K = (sum w)^2 / sum w^2,

    error = sqrt(u m / sum |out|^2)

and its limit takes the sum of the u errors for gamma distributed with mean u m + p and variance u (1 + u/K) s^2 + p^2,
p = max(1, u/K) y_max being a pseudo-row as in `certify`. The recent queries that were held out of the fit count as
`PRIOR` audits until there are audits; after `FADE` of them all that is left is the largest of their errors. The queries
to come resemble those that go before less than these resemble each other, so they may not count for as many as they
are. Whether to go on is judged a little less strictly, by `OUTLOOK` of them: else no model would live to its audits.
"""

import numpy as np

from .certify import Z95, share_of_rows

PRIOR, OUTLOOK, FADE = 8.0, 32.0, 16.0
AHEAD = 64  # a statement that decides whether to go on looks at no fewer answers


class Ledger:
    """The account of some heads since each one's last fit, and of all that was closed before."""

    answers: np.ndarray  # answers given
    guessed: np.ndarray  # those that are the model's
    size: np.ndarray  # sum of |out|^2
    slip: np.ndarray  # sum of the squared errors that rounding alone may have caused
    audits: np.ndarray
    weight: np.ndarray  # sums of the audits' weights, and of their squares
    weight_square: np.ndarray
    total: np.ndarray  # of the audits' squared errors: weighted sum, that of their squares, the largest
    squares: np.ndarray
    worst: np.ndarray
    prior_mean: np.ndarray  # of the rows that were held out of the fit
    prior_square: np.ndarray
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
        if len(errors):
            self.prior_mean[head], self.prior_square[head] = errors.mean(), np.square(errors).mean()
            self.prior_worst[head] = errors.max()

    def audit(self, drawn, errors, chance):
        """Squared errors (heads, T) of the model, where an audit was `drawn` with this chance."""
        errors, weight = np.where(drawn, errors, 0), np.where(drawn, 1 / np.maximum(chance, 1e-300) - 1, 0)
        self.audits += drawn.sum(axis=1)
        self.weight += weight.sum(axis=1)
        self.weight_square += np.square(weight).sum(axis=1)
        self.total += (weight * errors).sum(axis=1)
        self.squares += (weight * np.square(errors)).sum(axis=1)
        self.worst = np.maximum(self.worst, errors.max(axis=1))

    def answer(self, exact, sizes, slips):
        """Answers (heads, T): which are exact, their |out|^2, and what rounding may have made of each."""
        self.answers += exact.shape[1]
        self.guessed += (~exact).sum(axis=1)
        self.size += sizes.sum(axis=1)
        self.slip += slips.sum(axis=1)

    def outlook(self, guesses, size):
        """The limit if so many more answers of this mean size were the model's: at least `AHEAD` of them in all."""
        more = np.maximum(guesses, AHEAD - self.guessed)
        _, limit, size = self._sums(self.guessed + more, self.size + more * size, OUTLOOK)
        return np.sqrt(limit / np.maximum(size, 1e-300))

    def statement(self):
        """error, error_limit, row_error, row_share, audits, since each head's last fit."""
        error, limit, size = self._sums(self.guessed, self.size)
        size = np.maximum(size, 1e-300)
        worst = np.where(self.guessed > 0, np.maximum(self.worst, self.prior_worst) * self.answers, 0)
        row = np.sqrt((worst + self.slip) / size)
        share = np.array([share_of_rows(k) if u else 1.0 for k, u in zip(self.audits, self.guessed, strict=True)])
        error, limit = np.sqrt((error + self.slip) / size), np.sqrt((limit + self.slip) / size)
        return error, limit, row, share, self.audits.astype(int)

    def overall(self):
        """error and error_limit of all answers ever given."""
        error, limit, size = self._sums(self.guessed, self.size)
        size = np.maximum(size + self.closed_size, 1e-300)
        error, limit = error + self.slip + self.closed_square, limit + self.slip + self.closed_limit
        return np.sqrt(error / size), np.sqrt(limit / size)

    def _sample(self, prior):
        """How many squared errors are known, their mean, variance and largest."""
        known = self.weight**2 / np.maximum(self.weight_square, 1e-300)
        prior = prior * np.clip(1 - self.audits / FADE, 0, 1)
        count, weight = np.maximum(known + prior, 1e-300), np.maximum(self.weight, 1e-300)
        mean = (known * self.total / weight + prior * self.prior_mean) / count
        square = (known * self.squares / weight + prior * self.prior_square) / count
        return count, mean, np.maximum(square - mean**2, 0), np.maximum(self.worst, self.prior_worst)

    def _sums(self, guessed, size, prior=PRIOR):
        """Sum of the squared errors of so many guesses, its limit, and the size it is relative to."""
        count, mean, variance, worst = self._sample(prior)
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
