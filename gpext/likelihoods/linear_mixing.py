r"""Latent functions mixed linearly into tasks: the linear model of coregionalisation (LMC) as a likelihood.

    h_t(x) = sum_q a_qt g_q(x),     p(y | g) = prod_t p(y_t | h_t)

Under independent g_q ~ N(m_q, v_q) each h_t is N(sum_q a_qt m_q, sum_q a_qt^2 v_q), and a bound E on the tasks has

    dE/dm_q = sum_t a_qt g_t,     -2 dE/dv_q = sum_t a_qt^2 tau_t,     g_t = dE/dh-mean,  tau_t = -2 dE/dh-variance

So Q independent q(u_q) take natural-gradient steps as for any likelihood of Q latents. All move at once: a step of
length one is no coordinate ascent and can overshoot, which the strategy prevents by halving it.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Distribution

from gpext.checks import check_tensor, show_index
from gpext.likelihoods.composed import (
    check_inner,
    inner_density,
    inner_expected,
    inner_log_prob,
    inner_numbers,
    inner_shape,
)
from gpext.likelihoods.latent import LatentLikelihood


class LinearMixing(LatentLikelihood):
    r"""Tasks :math:`h_t = \sum_q a_{qt} g_q` of Q latent functions: :math:`p(y | g) = \prod_t p(y_t | h_t)`.

    `gpext.fit` makes one for gpytorch's `LMCVariationalStrategy` around a
    :class:`gpext.variational.SiteVariationalStrategy` of Q latents; `base.update(x, y, LinearMixing(likelihood,
    strategy.lmc_coefficients))` is a single step of it. The coefficients are trained with the hyperparameters.

    Args:
        likelihood: of gpext or gpytorch, of one latent, shared by all tasks. With a task a datum, a
            :class:`MixedLikelihood` gives each family of tasks a likelihood of its own.
        coefficients: a_qt (Q, T); trained if it is a Parameter.
        task_indices: the task of each datum (N,), whole numbers from 0, if only one task was observed at each input.
            Targets are then (N,), or what the likelihood takes. If None, all were: targets (..., N, T).
        jitter: variance added to h_t, as gpytorch's strategy does.

    Raises:
        TypeError: something else than a likelihood of one latent, or task indices that are not whole.
        ValueError: coefficients that are no matrix, or a task that is out of range.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import PoissonLikelihood
        >>> likelihood = LinearMixing(PoissonLikelihood(), torch.tensor([[1.0, 0.0], [1.0, 2.0]]))  # Q = 2, T = 2
        >>> likelihood.log_prob(torch.zeros(3, 2), torch.zeros(2, 3))  # of three data
        tensor([-2., -2., -2.])
    """

    task_indices: Tensor | None

    def __init__(
        self, likelihood: Likelihood, coefficients: Tensor, task_indices: Tensor | None = None, *, jitter: float = 0.0
    ) -> None:
        super().__init__()
        self._inner_numbers = inner_numbers("LinearMixing", likelihood)
        check_tensor("coefficients", coefficients)
        if coefficients.dim() != 2:
            raise ValueError(f"expected coefficients (Q, T), a matrix; got shape {tuple(coefficients.shape)}.")
        if task_indices is None and self._inner_numbers != 1:
            raise TypeError(
                f"the targets of {type(likelihood).__qualname__} are {self._inner_numbers} numbers: with them give "
                "task_indices, one task for each datum."
            )
        self.likelihood, self.jitter = likelihood, jitter
        self.num_latents, self.num_tasks = coefficients.shape
        if isinstance(coefficients, torch.nn.Parameter):
            self.coefficients = coefficients
        else:
            self.register_buffer("coefficients", coefficients)
        if task_indices is not None:
            check_tensor("task_indices", task_indices)
            if task_indices.is_floating_point() or task_indices.dtype == torch.bool or task_indices.dim() != 1:
                raise TypeError(
                    f"task_indices must be whole numbers (N,); got {task_indices.dtype} of shape "
                    f"{tuple(task_indices.shape)}."
                )
            self._check_tasks(task_indices)
        # Data are no part of a state dict.
        self.register_buffer("task_indices", task_indices, persistent=False)

    @property
    def target_numbers(self) -> int:
        """T, or one more than the likelihood inside has."""
        return self.num_tasks if self.task_indices is None else self._inner_numbers + 1

    def datum_shape(self, targets: Tensor) -> torch.Size:
        """Return the shape of the data (..., N)."""
        if self.task_indices is None or self._is_joined(targets):
            return targets.shape[:-1]
        return inner_shape(self.likelihood, targets)

    def join(self, targets: Tensor) -> Tensor:
        """Return targets with the task of each datum as their last number, (..., N, k + 1); (..., N, T) as they are.

        Raises:
            ValueError: there is no task for each of them.
        """
        if self.task_indices is None or self._is_joined(targets):
            return targets
        data = self.datum_shape(targets)
        if data[-1:] != self.task_indices.shape:
            raise ValueError(
                f"LinearMixing holds the tasks of {len(self.task_indices)} data, and there are targets of shape "
                f"{tuple(targets.shape)}. For a part of the data take likelihood.take(targets, index) of all."
            )
        rows = self.likelihood.join(targets) if isinstance(self.likelihood, LatentLikelihood) else targets
        rows = rows if rows.is_floating_point() else rows.double()
        rows = rows.unsqueeze(-1) if self._inner_numbers == 1 else rows
        return torch.cat([rows, self.task_indices.to(rows).expand(data).unsqueeze(-1)], -1)

    def take(self, targets: Tensor, index: Tensor | slice) -> Tensor:
        """Return the targets of the data at `index`, their tasks with them."""
        return self.join(targets)[..., index, :]

    def check(self, targets: Tensor) -> None:
        """Raise unless the targets are allowed for the likelihood inside, and there is a task or T of them for each.

        Raises:
            TypeError, ValueError: as the likelihood inside; another number of tasks.
        """
        check_tensor("targets", targets)
        if self.task_indices is None and (targets.dim() < 2 or targets.size(-1) != self.num_tasks):
            raise ValueError(
                f"expected targets (..., N, {self.num_tasks}), one for each task; got shape {tuple(targets.shape)}. If "
                "one task was observed at each input give task_indices."
            )
        y, tasks = self._parts(targets)
        if tasks is not None:
            self._check_tasks(tasks)
        check_inner(self.likelihood, y)

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(y | g) (..., N), for latent values (..., Q, N)."""
        y, tasks = self._parts(targets)
        return self._summed(inner_log_prob(self.likelihood, y, self._mix(f, tasks, self.coefficients)))

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | g)] (..., N) under independent N(mean, variance), (..., Q, N).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        y, tasks = self._parts(targets)
        return self._summed(inner_expected(self.likelihood, y, *self._mixed(mean, variance, tasks)))

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(y | g) N(g | mean, variance) dg (..., N) of data of one task each.

        Raises:
            TypeError, ValueError: as :meth:`check`.
            NotImplementedError: all tasks of a datum were observed, whose integral has Q dimensions.
        """
        self.check(targets)
        y, tasks = self._parts(targets)
        if tasks is None:
            raise NotImplementedError(
                "the density of all tasks of a datum together is an integral over Q latents: that of each task is "
                "likelihood.log_marginal(y[..., t], model(x, task_indices=t)) of the likelihood inside."
            )
        return inner_density(self.likelihood, y, *self._mixed(mean, variance, tasks))

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | g) of all tasks, with batch shape (..., N, T), for latent values (..., Q, N)."""
        h = self._mix(function_samples, None, self.coefficients)
        return self.likelihood.forward(h.mT, *args, **kwargs)

    def _mix(self, latents: Tensor, tasks: Tensor | None, coefficients: Tensor) -> Tensor:
        """Return sum_q a_qt g_q, (..., T, N) of all tasks or (..., N) of one for each datum."""
        if tasks is None:
            return coefficients.mT.to(latents) @ latents
        return (coefficients.to(latents)[:, tasks.long()].movedim(0, -2) * latents).sum(-2)

    def _mixed(self, mean: Tensor, variance: Tensor, tasks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return means and variances of h."""
        variance = self._mix(variance, tasks, self.coefficients.square()) + self.jitter
        return self._mix(mean, tasks, self.coefficients), variance

    def _summed(self, terms: Tensor) -> Tensor:
        return terms.sum(-2) if self.task_indices is None else terms

    def _parts(self, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the targets of the likelihood inside, (..., T, N) or (..., N), and the tasks (..., N)."""
        if self.task_indices is None:
            return targets.mT, None
        joined = self.join(targets)
        inner = joined[..., :-1]
        return inner.squeeze(-1) if self._inner_numbers == 1 else inner, joined[..., -1]

    def _is_joined(self, targets: Tensor) -> bool:
        return targets.dim() > 1 and targets.size(-1) == self._inner_numbers + 1

    def _check_tasks(self, tasks: Tensor) -> None:
        wrong = ((tasks < 0) | (tasks >= self.num_tasks)).nonzero()
        if len(wrong):
            place = tuple(wrong[0].tolist())
            raise ValueError(
                f"tasks must be from 0 to {self.num_tasks - 1}; got {int(tasks[place])} at index {show_index(place)}."
            )
