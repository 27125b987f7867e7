"""The outcomes of sampling."""

from __future__ import annotations

from enum import Enum


class SamplingStatus(Enum):
    """The outcome of sampling; the value is a sentence with advice.

    Example:
        >>> bool(SamplingStatus.MIXED.value)
        True
    """

    MIXED = "the chains agree, every split R-hat below 1.01"
    NOT_MIXED = "the chains do not agree yet; continue with run(..., resume=draws)"
    INTERRUPTED = "interrupted; continue with run(..., resume=draws)"
    NOT_WRITTEN = (
        "the directory could not be written to; the last draws are in memory, continue with run(..., resume=draws)"
    )
    DIVERGED = (
        "a chain has left the hyperparameters at which the model can be evaluated; start again with a smaller step "
        "size, the draws before it are kept"
    )
    NOT_INVERTED = "phi could not be inverted numerically for a draw of w; the draws before it are kept"
    BREAKDOWN = "a covariance was not positive definite, pass a `jitter`; the draws before it are kept"
