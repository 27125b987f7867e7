r"""Random problems for :mod:`benchmarks.honest_endings`: any rule, any likelihood, mild or extreme numbers.

A problem is a function of its seed alone. Half of them are mild: scales within a factor of ten of one, targets that the
likelihood draws from the prior. The other half have what occurs in real data but is rarely tested: prior variances and
noise over many powers of ten, distant prior means, duplicate inputs, singular covariances, one datum, one class, no
counts, giant counts, outliers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gpytorch
import torch
from gpytorch.constraints import Positive
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

from gpext import likelihoods
from gpext.inference import CAVI, EP, KL, Laplace, Taylor

F64 = torch.float64
RULES: dict[str, Any] = {"taylor": Taylor, "laplace": Laplace, "kl": KL, "cavi": CAVI, "ep": EP}


class Dice:
    """Random numbers of one problem."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, low: float, high: float) -> float:
        """Return a number between two others."""
        return low + (high - low) * float(torch.rand((), generator=self.generator, dtype=F64))

    def power(self, low: float, high: float) -> float:
        """Return ten to a power between two."""
        return 10 ** self.uniform(low, high)

    def integer(self, low: int, high: int) -> int:
        """Return an integer, both ends included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def choose(self, *options: Any) -> Any:
        """Return one of several."""
        return options[self.integer(0, len(options) - 1)]

    def chance(self, probability: float) -> bool:
        """Return whether something happens."""
        return self.uniform(0, 1) < probability

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers."""
        return torch.randn(shape, generator=self.generator, dtype=F64)


@dataclass(frozen=True)
class Problem:
    """One of them; `covariance` requires a gradient.

    Attributes:
        seed: which makes it.
        family: of the likelihood.
        rule_name: of :data:`RULES`.
        likelihood: in the dtype of the prior.
        mean: mu (N,) or (D, N).
        covariance: K (N, N) or (D, N, N).
        targets: as the likelihood takes them.
        rank_one: the number of which all latent values are the same multiple, if there is one: 1-d integrals are exact.
    """

    seed: int
    family: str
    rule_name: str
    likelihood: Any
    mean: Tensor
    covariance: Tensor
    targets: Tensor
    rank_one: bool

    @property
    def prior(self) -> MultivariateNormal:
        """p(f)."""
        return MultivariateNormal(self.mean, to_linear_operator(self.covariance))

    @property
    def likelihood_has_one_latent(self) -> bool:
        """Whether the prior is one of latent values (N,)."""
        return self.mean.dim() == 1

    def infer(self, rule_name: str) -> Any:
        """Return what a rule at its defaults makes of it."""
        return RULES[rule_name]().infer(self.prior, self.likelihood, self.targets)


@dataclass(frozen=True)
class Family:
    """A likelihood and its targets.

    Attributes:
        make: (dice, is_hard) -> likelihood, float64.
        targets: (dice, is_hard, likelihood, f) -> targets at latent values (N,) or (D, N).
        rules: that serve it.
        num_latents: D, or None for one.
    """

    make: Callable[[Dice, bool], Any]
    targets: Callable[[Dice, bool, Any, Tensor], Tensor]
    rules: tuple[str, ...]
    num_latents: int | None = None


def random_problem(seed: int) -> Problem:
    """Return the problem of a seed."""
    dice = Dice(seed)
    name = dice.choose(*FAMILIES)
    family = FAMILIES[name]
    rule_name = dice.choose(*family.rules)
    is_hard = dice.chance(0.5)
    latents = family.num_latents
    most = 60 if latents is None else 15
    n = 1 if dice.chance(0.1) else dice.integer(2, most)
    covariance, rank_one = _covariance(dice, is_hard, n, latents)
    mean = torch.zeros(n, dtype=F64)
    if is_hard and dice.chance(0.3):
        mean = torch.full((n,), dice.choose(-1, 1) * dice.choose(1.0, 5.0, 40.0, 100.0, 1000.0), dtype=F64)
    if latents is not None:
        mean = mean.expand(latents, n).clone()
    likelihood = family.make(dice, is_hard)
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    root = vectors * eigenvalues.clamp_min(0).sqrt().unsqueeze(-2)
    f = (root @ dice.normal(*mean.shape, 1)).squeeze(-1)
    targets = family.targets(dice, is_hard, likelihood, f.clamp(-6, 6))
    if dice.chance(0.25):
        likelihood, mean, covariance = likelihood.float(), mean.float(), covariance.float()
        targets = targets if family.num_latents is not None and name == "dirichlet" else targets.float()
    return Problem(
        seed, name, rule_name, likelihood, mean, covariance.requires_grad_(), targets, rank_one and latents is None
    )


def _covariance(dice: Dice, is_hard: bool, n: int, latents: int | None) -> tuple[Tensor, bool]:
    """Return K, and whether it is a multiple of ones."""
    dims = dice.integer(1, 3)
    x = 3 * torch.rand(n, dims, generator=dice.generator, dtype=F64)
    if is_hard and dice.chance(0.2):
        x = x[torch.randint(max(n // 2, 1), (n,), generator=dice.generator)]  # duplicates
    scale = dice.power(-6, 6) if is_hard else dice.power(-1, 1)
    lengthscale = dice.power(-2, 2) if is_hard else dice.power(-0.5, 0.5)
    kind = dice.choose("rbf", "rbf", "matern12", "matern32", "constant", "linear")
    r = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") / lengthscale
    profile = {
        "rbf": lambda: torch.exp(-0.5 * r.square()),
        "matern12": lambda: torch.exp(-r),
        "matern32": lambda: (1 + math.sqrt(3) * r) * torch.exp(-math.sqrt(3) * r),
        "constant": lambda: torch.ones_like(r),
        "linear": lambda: 0.1 + x @ x.mT / lengthscale**2,
    }[kind]
    K = scale * profile()
    if latents is not None:
        factors = torch.tensor([dice.power(-0.3, 0.3) for _ in range(latents)], dtype=F64)
        K = factors.view(-1, 1, 1) * K
    return K, kind == "constant" or n == 1


# ---- likelihoods ---------------------------------------------------------------------------------------------------


def _with_noise(kind: Callable[..., Any]) -> Callable[[Dice, bool], Any]:
    def make(dice: Dice, is_hard: bool) -> Any:
        likelihood = kind(noise_constraint=Positive()).double()
        likelihood.initialize(noise=torch.tensor(dice.power(-6, 4) if is_hard else dice.power(-2, 0), dtype=F64))
        return likelihood

    return make


def _student_t(dice: Dice, is_hard: bool) -> Any:
    likelihood = likelihoods.StudentTLikelihood(deg_free_constraint=Positive(), noise_constraint=Positive()).double()
    noise = dice.power(-6, 4) if is_hard else dice.power(-2, 0)
    deg_free = dice.power(0, 3) if is_hard else dice.uniform(2.1, 10)
    tensor = torch.tensor([deg_free, noise], dtype=F64)
    likelihood.initialize(deg_free=tensor[0], noise=tensor[1])
    return likelihood


def _laplace(dice: Dice, is_hard: bool) -> Any:
    return _with_noise(likelihoods.LaplaceLikelihood)(dice, is_hard)


def _pseudo_huber(dice: Dice, is_hard: bool) -> Any:
    width = dice.power(-2, 2) if is_hard else dice.power(-0.5, 0.5)
    if is_hard:  # phi itself underflows far from the data, where its error says that log phi is needed
        return likelihoods.SuperGaussianLikelihood(log_phi=lambda r: 1 - torch.sqrt(1 + r / width)).double()
    return likelihoods.SuperGaussianLikelihood(phi=lambda r: torch.exp(1 - torch.sqrt(1 + r / width))).double()


def _simple(make: Callable[[], Any]) -> Callable[[Dice, bool], Any]:
    return lambda dice, is_hard: make().double()


def _sized(make: Callable[[int], Any], classes: int) -> Callable[[Dice, bool], Any]:
    return lambda dice, is_hard: make(classes).double()


# ---- targets -------------------------------------------------------------------------------------------------------


def _real(dice: Dice, is_hard: bool, likelihood: Any, f: Tensor) -> Tensor:
    noise = float(likelihood.noise.detach()) if hasattr(likelihood, "noise") else 1.0
    y = f + noise**0.5 * dice.normal(*f.shape)
    if is_hard:
        far = dice.choose(1.0, 10.0, 1e3, 1e6)
        y = torch.where(torch.rand(y.shape, generator=dice.generator) < 0.2, y + far * dice.normal(*y.shape), y)
        if dice.chance(0.1):
            y = torch.full_like(y, float(y.flatten()[0]))
    return y


def _binary(dice: Dice, is_hard: bool, likelihood: Any, f: Tensor) -> Tensor:
    y = (torch.rand(f.shape, generator=dice.generator, dtype=F64) < torch.sigmoid(f)).to(F64)
    return torch.full_like(y, float(dice.integer(0, 1))) if is_hard and dice.chance(0.2) else y


def _counts(dice: Dice, is_hard: bool, likelihood: Any, f: Tensor) -> Tensor:
    y = torch.poisson(f.exp(), generator=dice.generator)
    if is_hard and dice.chance(0.4):
        kind = dice.choose("none", "one", "giant")
        y = torch.zeros_like(y) if kind == "none" else y
        y = (y * dice.power(0, 9)).round() if kind == "giant" else y
        if kind == "one":
            y.view(-1)[0] = round(dice.power(2, 8))
    return y


def _trials(dice: Dice, is_hard: bool, likelihood: Any, f: Tensor) -> Tensor:
    """Return failures before as many successes as the negative binomial has."""
    y = torch.poisson(torch.exp(f.clamp(-3, 3)), generator=dice.generator)
    return (y * dice.power(0, 5)).round() if is_hard and dice.chance(0.3) else y


def _ordered(dice: Dice, is_hard: bool, likelihood: Any, f: Tensor) -> Tensor:
    y = (f + dice.normal(*f.shape) + 2).round().clamp(0, 3)
    return torch.full_like(y, float(dice.integer(0, 3))) if is_hard and dice.chance(0.2) else y


def _classes(dice: Dice, is_hard: bool, likelihood: Any, f: Tensor) -> Tensor:
    if is_hard and dice.chance(0.2):
        return torch.full(f.shape[-1:], float(dice.integer(0, 2)), dtype=F64)
    return torch.randint(3, f.shape[-1:], generator=dice.generator).to(F64)


def _class_counts(dice: Dice, is_hard: bool, likelihood: Any, f: Tensor) -> Tensor:
    y = torch.poisson(3 * f.mT.softmax(-1), generator=dice.generator)
    y[..., 0] += 1  # a total of zero has no information and no meaning
    return (y * dice.power(0, 9)).round() if is_hard and dice.chance(0.3) else y


def _several_counts(dice: Dice, is_hard: bool, likelihood: Any, f: Tensor) -> Tensor:
    return _counts(dice, is_hard, likelihood, f).mT.contiguous()


def _angles(dice: Dice, is_hard: bool, likelihood: Any, f: Tensor) -> Tensor:
    y = math.pi * (2 * torch.rand(f.shape[-1:], generator=dice.generator, dtype=F64) - 1)
    return torch.full_like(y, float(y[0])) if is_hard and dice.chance(0.2) else y


def _proportions(dice: Dice, is_hard: bool, likelihood: Any, f: Tensor) -> Tensor:
    spread = dice.choose(1.0, 5.0, 15.0) if is_hard else 0.8
    y = (spread * dice.normal(f.size(-1), f.size(-2))).softmax(-1).clamp_min(1e-12)
    return y / y.sum(-1, keepdim=True)


def _unit(dice: Dice, is_hard: bool, likelihood: Any, f: Tensor) -> Tensor:
    edge = dice.choose(1e-2, 1e-6, 1e-12) if is_hard else 0.05
    return edge + (1 - 2 * edge) * torch.rand(f.shape[-1:], generator=dice.generator, dtype=F64)


_ALL = ("taylor", "laplace", "kl", "cavi", "ep")
_SMOOTH = ("taylor", "laplace", "kl", "ep")
_SEVERAL = ("taylor", "laplace", "kl")
FAMILIES: dict[str, Family] = {
    "student_t": Family(_student_t, _real, ("laplace", "kl", "cavi", "ep")),
    "laplace": Family(_laplace, _real, ("kl", "cavi", "ep")),
    "matern32": Family(_with_noise(likelihoods.Matern32Likelihood), _real, ("laplace", "kl", "cavi", "ep")),
    "pseudo_huber": Family(_pseudo_huber, _real, _ALL),
    "gaussian": Family(_with_noise(gpytorch.likelihoods.GaussianLikelihood), _real, _SMOOTH),
    "bernoulli_logit": Family(_simple(likelihoods.BernoulliLogitLikelihood), _binary, _ALL),
    "bernoulli_probit": Family(_simple(gpytorch.likelihoods.BernoulliLikelihood), _binary, _SMOOTH),
    "bayesian_svm": Family(_simple(likelihoods.BayesianSVMLikelihood), _binary, ("kl", "cavi", "ep")),
    "negative_binomial": Family(_simple(likelihoods.NegativeBinomialLogitLikelihood), _trials, _ALL),
    "poisson": Family(_simple(likelihoods.PoissonLikelihood), _counts, _SMOOTH),
    "ordinal_logit": Family(_sized(likelihoods.OrdinalLogitLikelihood, 4), _ordered, _SMOOTH),
    "ordinal_probit": Family(_sized(likelihoods.OrdinalProbitLikelihood, 4), _ordered, _SMOOTH),
    "multinomial": Family(_sized(likelihoods.MultinomialLogitLikelihood, 3), _classes, _SEVERAL, 3),
    "class_counts": Family(
        _simple(lambda: likelihoods.MultinomialLogitLikelihood(3, None)), _class_counts, _SEVERAL, 3
    ),
    "stick_breaking": Family(_sized(likelihoods.StickBreakingLikelihood, 3), _classes, ("kl",), 2),
    "several_counts": Family(_sized(likelihoods.MultivariatePoissonLikelihood, 2), _several_counts, _SEVERAL, 2),
    "von_mises": Family(_simple(likelihoods.VonMisesLikelihood), _angles, _SEVERAL, 2),
    "dirichlet": Family(_sized(likelihoods.DirichletLikelihood, 3), _proportions, _SEVERAL, 3),
    "dirichlet5": Family(_sized(likelihoods.DirichletLikelihood, 5), _proportions, ("laplace", "kl"), 5),
    "beta": Family(_simple(likelihoods.BetaLikelihood), _unit, _SEVERAL, 2),
}
