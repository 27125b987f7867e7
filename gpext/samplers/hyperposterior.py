"""Draws of the hyperparameters of a GP, what they say about the sampler, and predictions averaged over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import Normal

from gpext.distributions import BatchMixture
from gpext.samplers.exporting import to_arviz
from gpext.samplers.state import WalkState
from gpext.samplers.status import SamplingStatus
from gpext.samplers.targets.latent_posterior import checked_inputs
from gpext.samplers.targets.log_posterior import LogPosterior
from gpext.samplers.targets.predictive import predictive

if TYPE_CHECKING:
    import arviz


@dataclass(frozen=True)
class HyperPosterior:
    """Draws of C chains, S each.

    Attributes:
        raw: in the coordinates of the target (C, S, P), without bounds.
        state: what the chains go on from, see `run(..., resume=)`.
        status: how it ended.
        message: one sentence on how it went.
        seconds: time spent on the last run.
        r_hat: the largest split R-hat.
        acceptance: of proposals, a chain (C,); nan where nothing is rejected.
    """

    target: LogPosterior = field(repr=False)
    raw: Tensor = field(repr=False)
    state: WalkState = field(repr=False)
    status: SamplingStatus
    message: str
    seconds: float
    r_hat: float
    acceptance: Tensor

    @property
    def draws(self) -> dict[str, Tensor]:
        """The hyperparameters by name, in constrained space (C, S, *shape)."""
        return self.target.moved.constrained(self.raw)

    def to_arviz(self) -> arviz.InferenceData:
        """Return the draws for ArviZ: its diagnostics, tables and plots; a `DataTree` from ArviZ 1.0 on.

        Raises:
            ImportError: ArviZ is not installed.
        """
        return to_arviz({"posterior": self.draws})

    @torch.no_grad()
    def predict(self, x: Tensor, *, num_draws: int = 100, noise: Tensor | None = None) -> BatchMixture:
        """Return p(y_* | y) at new inputs (S,), the average of Gaussians over draws.

        Without a factorisation where draws came from unbiased gradients.

        Args:
            x: (S, d).
            num_draws: how many draws to average over, evenly spaced in the chains; all if there are fewer.
            noise: of a likelihood with fixed noise, its variances (S,) at x; without them the prediction is of f, and
                of what noise is learnt.

        Raises:
            TypeError: noise of a likelihood that takes none.
            ValueError: no draw, or x is not finite or not of the training inputs' dimension.
            FloatingPointError: a draw makes no covariance of the data that can be solved with.
        """
        raw = self.raw.transpose(0, 1).flatten(0, 1)
        if num_draws < 1 or not len(raw):
            raise ValueError(f"expected at least one draw to average over; got {num_draws} of {len(raw)}.")
        x = checked_inputs(x, self.target.model.train_inputs[0])
        chosen = torch.linspace(0, len(raw) - 1, min(num_draws, len(raw)), device="cpu").round().long()
        means, variances = [], []
        for index in chosen.tolist():
            self.target.moved.write(raw[index])
            try:
                mean, variance = predictive(self.target, x, noise)
            except FloatingPointError as error:
                at = ", ".join(
                    f"{name} {each.tolist()}" for name, each in self.target.moved.constrained(raw[index]).items()
                )
                raise FloatingPointError(f"no prediction from draw {index}, {at}: {error}") from error
            means.append(mean)
            variances.append(variance)
        return BatchMixture(Normal(torch.stack(means), torch.stack(variances).sqrt()))
