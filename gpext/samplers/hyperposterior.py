"""Draws of the hyperparameters of a GP, what they say about the sampler, and predictions averaged over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import Normal

from gpext.distributions import BatchMixture
from gpext.samplers.chain_state import WalkState
from gpext.samplers.draws import SamplingStatus
from gpext.samplers.log_posterior import LogPosterior

if TYPE_CHECKING:
    import arviz


@dataclass(frozen=True)
class HyperPosterior:
    """Draws of C chains, S each.

    Attributes:
        raw: in unconstrained space (C, S, P).
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
        """Return the draws for ArviZ: its diagnostics, tables and plots.

        Raises:
            ImportError: ArviZ is not installed.
        """
        try:
            import arviz
        except ImportError as error:
            raise ImportError("to_arviz() needs ArviZ: pip install arviz.") from error
        return arviz.from_dict(posterior={name: draws.cpu().numpy() for name, draws in self.draws.items()})

    @torch.no_grad()
    def predict(self, x: Tensor, *, num_draws: int = 100) -> BatchMixture:
        """Return p(y_* | y) at new inputs (S,), the average of Gaussians over draws.

        Args:
            x: (S, d).
            num_draws: how many draws to average over, evenly spaced in the chains; all if there are fewer.

        Raises:
            ValueError: no draw.
        """
        raw = self.raw.transpose(0, 1).flatten(0, 1)
        if num_draws < 1 or not len(raw):
            raise ValueError(f"expected at least one draw to average over; got {num_draws} of {len(raw)}.")
        chosen = torch.linspace(0, len(raw) - 1, min(num_draws, len(raw))).round().long()
        means, variances = [], []
        model = self.target.model
        try:
            for row in raw[chosen]:
                self.target.moved.write(row)
                model.train()  # forget what belonged to the last draw
                with self.target.factorised():
                    predicted = model.likelihood(model.eval()(x))
                    means.append(predicted.mean)
                    variances.append(predicted.variance)
        finally:
            model.train()
        return BatchMixture(Normal(torch.stack(means), torch.stack(variances).sqrt()))
