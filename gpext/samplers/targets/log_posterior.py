"""The log posterior of the hyperparameters of a GP, in coordinates without bounds, as samplers of them want it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from gpytorch import settings
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gpext.checks import check_finite
from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.parallel import described, fingerprint, tensors_of
from gpext.samplers.targets.chain_target import ChainTarget
from gpext.samplers.targets.hyperparameters import Hyperparameters
from gpext.threads import factor_flops

# What gpytorch raises where a covariance cannot be factorised as it is, with its warnings as errors.
NO_SUCH_MODEL = (NotPSDError, NanError, NumericalWarning, torch.linalg.LinAlgError)


class LogPosterior(ChainTarget):
    """log p(theta | y) up to a constant, of a copy of the model: its parameters stay as they are.

    gpytorch's objective is divided by the number of data and leaves the Jacobian of the constraints out; both are
    undone. Beyond 800 data it is itself an estimate, of stopped conjugate gradients and Lanczos; here a matrix is
    factorised whatever its size. What cannot be factorised as it is, or overflows, has probability zero.

    Args:
        mll: an ExactMarginalLogLikelihood or a subclass, such as :class:`gpext.mlls.UnbiasedMarginalLogLikelihood`.
        names: which parameters, with or without `raw_`; by default all that require gradients. One without a prior has
            a uniform one.
        logarithms: whether the coordinates are log(theta - bound) for parameters with a lower bound alone; else they
            are gpytorch's raw values.

    Raises:
        TypeError: another objective.
        ValueError: there is no such parameter, or none; inputs or targets are not finite.

    Example:
        >>> import gpytorch, torch
        >>> from gpytorch.priors import LogNormalPrior
        >>> class Model(gpytorch.models.ExactGP):
        ...     def __init__(self, x, y):
        ...         super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        ...         self.mean_module = gpytorch.means.ZeroMean()
        ...         self.covar_module = gpytorch.kernels.RBFKernel(lengthscale_prior=LogNormalPrior(0.0, 1.0))
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 6, 20).double()
        >>> mll = gpytorch.mlls.ExactMarginalLogLikelihood((model := Model(x, torch.sin(x)).double()).likelihood, model)
        >>> target = LogPosterior(mll, ["covar_module.lengthscale"])
        >>> target.size, target.value(torch.zeros(1).double()) > target.value(torch.full((1,), -9.0).double())
        (1, True)
    """

    def __init__(
        self, mll: ExactMarginalLogLikelihood, names: Sequence[str] | None = None, *, logarithms: bool = False
    ) -> None:
        if not isinstance(mll, ExactMarginalLogLikelihood):
            raise TypeError(
                f"expected an ExactMarginalLogLikelihood or a subclass of it; got {type(mll).__qualname__}. Those "
                "of other likelihoods move in gpext.samplers.GibbsSampler(model), if there is an augmentation, and in "
                "pyro.infer.NUTS on a gpext.ppl.latent_model whose prior is a function that samples them."
            )
        self.mll = copy.deepcopy(mll).train()
        self.model = self.mll.model
        for x in self.model.train_inputs:
            check_finite("inputs", x)
            if x.dim() > 2:
                raise ValueError(f"expected inputs (N, d) of one GP, no batch of them; got {tuple(x.shape)}.")
        check_finite("targets", self.model.train_targets)
        if names is None:
            names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self.logarithms = logarithms
        self.moved = Hyperparameters(self.model, names, logarithms=logarithms)
        if not self.moved.size:
            raise ValueError("there is no hyperparameter to draw: none requires gradients.")
        self._own = self.moved.read()
        self._x, self._y = self.model.train_inputs, self.model.train_targets

    @property
    def is_estimated(self) -> bool:
        """Whether gradients are estimates."""
        return isinstance(self.mll, UnbiasedMarginalLogLikelihood)

    @property
    def device(self) -> torch.device:
        """The CPU, wherever the model is: there are few coordinates."""
        return torch.device("cpu")

    @property
    def size(self) -> int:
        """P."""
        return self.moved.size

    @property
    def flops(self) -> float:
        """Those of the factor that a step of one chain needs."""
        return factor_flops(self.num_data)

    @property
    def origin(self) -> dict[str, Any]:
        """The identity of the target."""
        return {
            "hyperparameters": [slot.coordinate for slot in self.moved.slots],
            "model": described(self.model),
            "fingerprint of the data": fingerprint(self.data),
        }

    @property
    def data(self) -> list[Tensor]:
        """Inputs and targets, float64."""
        return [each.double() for each in (*self._x, self._y)]

    @property
    def fixed(self) -> list[Tensor]:
        """The parameters and buffers of the model that are not moved, float64."""
        return tensors_of(self.model, [slot.parameter for slot in self.moved.slots])

    @property
    def num_data(self) -> int:
        """N."""
        return self._y.numel()

    def reset(self) -> None:
        """Set the model to its own values: evaluations leave it elsewhere."""
        self.moved.write(self._own)

    def value(self, raw: Tensor) -> float:
        """Return log p(theta | y) at coordinates (P,); -inf where there is no such model."""
        with torch.no_grad():
            return float(self._log_density(raw))

    def gradient(self, raw: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Return its gradient (P,), on the CPU, at coordinates, or an unbiased estimate, as the objective has it.

        Args:
            raw: (P,).
            generator: for an estimate, in place of the solver's own.

        Raises:
            FloatingPointError: there is no such model.
        """
        if generator is not None and isinstance(self.mll, UnbiasedMarginalLogLikelihood):
            self.mll.solver = replace(self.mll.solver, generator=generator)
        with torch.enable_grad():
            value = self._log_density(raw)
            if not bool(value.isfinite()):
                raise FloatingPointError("the log posterior is not finite at these hyperparameters.")
            slopes = torch.autograd.grad(value, [slot.parameter for slot in self.moved.slots])
        return self.moved.by_coordinates(slopes)

    def constrained(self, raw: Tensor) -> dict[str, Tensor]:
        """Return hyperparameters (..., *shape) by parameter name for coordinates (..., P)."""
        return self.moved.constrained(raw)

    def factorised(self) -> settings.max_cholesky_size:
        """Return the context in which gpytorch factorises the covariance of the data, unless solves are unbiased."""
        limit = settings.max_cholesky_size.value()
        return settings.max_cholesky_size(limit if self.is_estimated else max(limit, self.num_data))

    def _log_density(self, raw: Tensor) -> Tensor:
        self.moved.write(raw)
        jacobian = self.moved.log_jacobian()
        if not bool(jacobian.isfinite()):  # on the edge of a constraint, where some priors have no density to give
            return raw.new_tensor(-torch.inf)
        try:
            with self.factorised(), warnings.catch_warnings():
                warnings.simplefilter("error", NumericalWarning)  # jitter would make it another model
                value = self.mll(self.model(*self._x), self._y).double() * self.num_data
        except NO_SUCH_MODEL:
            return raw.new_tensor(-torch.inf)
        value = value.cpu() + jacobian
        return torch.where(value.isnan(), -torch.inf, value)
