"""Random models for :mod:`benchmarks.honest_endings`, to be trained by `gpext.fit`: dense, sparse, site strategies.

Their targets and likelihoods are those of :mod:`benchmarks.honest_problems`; the kernel starts anywhere between a
hundredth and a hundred times the scale of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

import gpext
from benchmarks.honest_problems import F64, FAMILIES, RULES, Dice

KINDS = ("dense", "sparse", "site", "minibatch")
_STEPS = {"minibatch": 60}  # most; of the others _FEW
_FEW = 30


@dataclass(frozen=True)
class FitProblem:
    """A model to be trained.

    Attributes:
        seed: which makes it.
        family: of the likelihood.
        kind: of the model, one of :data:`KINDS`.
        rule_name: of its inference; that of a site strategy is its objective.
        mll: the objective.
        x: inputs (N, d).
        y: targets.
    """

    seed: int
    family: str
    kind: str
    rule_name: str
    mll: Any
    x: Tensor
    y: Tensor

    def fit(self, callback: Callable[[int, float], None]) -> Any:
        """Train the model, and return the result; the callback is called after every step."""
        options: dict[str, Any] = {"batch_size": 10} if self.kind == "minibatch" else {}
        generator = torch.Generator().manual_seed(self.seed)
        steps = _STEPS.get(self.kind, _FEW)
        options |= {"max_steps": steps, "generator": generator, "callback": callback}
        return gpext.fit(self.mll, self.x, self.y, progress=False, **options)


class _Processes:
    """A constant mean and a squared exponential of one latent, or of D."""

    def add_processes(self, latents: int | None, dims: int, lengthscale: float, outputscale: float) -> None:
        """Add the modules."""
        batch = torch.Size([] if latents is None else [latents])
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        base = gpytorch.kernels.RBFKernel(ard_num_dims=dims, batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(base, batch_shape=batch)
        base.lengthscale = lengthscale
        self.covar_module.outputscale = outputscale

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class _Latent(_Processes, gpext.models.LatentGP):
    pass


class _Site(_Processes, gpytorch.models.ApproximateGP):
    pass


def random_fit(seed: int) -> FitProblem:
    """Return the model of a seed."""
    dice = Dice(seed)
    name = dice.choose(*FAMILIES)
    family = FAMILIES[name]
    kind = dice.choose(*KINDS) if family.num_latents is None else dice.choose("dense", "sparse")
    rule_name = dice.choose(*family.rules)
    is_hard = dice.chance(0.5)
    latents, n, dims = family.num_latents, dice.integer(12, 40), dice.integer(1, 3)
    x = 3 * torch.rand(n, dims, generator=dice.generator, dtype=F64)
    if is_hard and dice.chance(0.2):
        x[:, 0] = 1.0
    if is_hard and dice.chance(0.2):
        x = x[torch.randint(n // 2, (n,), generator=dice.generator)]
    likelihood = family.make(dice, is_hard).requires_grad_()
    f = torch.sin(2 * x.sum(-1)) + 0.3 * dice.normal(*(() if latents is None else (latents, 1)))
    y = family.targets(dice, is_hard, likelihood, f)
    scales = (dice.power(-2, 2), dice.power(-2, 2)) if is_hard else (1.0, 1.0)
    processes = (latents, dims, *scales)
    if dice.chance(0.25) and not name.startswith("dirichlet"):  # proportions in float32 do not sum to one
        x, y, likelihood = x.float(), y.float(), likelihood.float()
    make: Callable[..., Any] = _of_latents if kind in ("dense", "sparse") else _of_sites
    mll = make(dice, kind, rule_name, likelihood, x, y, processes)
    return FitProblem(seed, name, kind, rule_name, mll.to(x), x, y)


def _of_latents(dice: Dice, kind: str, rule_name: str, likelihood: Any, x: Tensor, y: Tensor, processes: Any) -> Any:
    inducing = x[:8].clone() if kind == "sparse" else None
    model = _Latent(x, y, likelihood, RULES[rule_name](), inducing_inputs=inducing)
    model.add_processes(*processes)
    return gpext.mlls.LatentMarginalLogLikelihood(likelihood, model)


def _of_sites(dice: Dice, kind: str, rule_name: str, likelihood: Any, x: Tensor, y: Tensor, processes: Any) -> Any:
    model = _Site.__new__(_Site)
    gpytorch.models.ApproximateGP.__init__(model, gpext.variational.SiteVariationalStrategy(model, x[:8].clone()))
    model.add_processes(*processes)
    augmented = isinstance(likelihood, gpext.likelihoods.AugmentedLikelihood) and dice.chance(0.5)
    objective = gpext.mlls.AugmentedELBO if augmented else gpytorch.mlls.VariationalELBO
    return objective(likelihood, model, num_data=len(x))
