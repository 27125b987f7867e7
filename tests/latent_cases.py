"""Likelihoods for the laws of full-data inference: each with targets, the rules that support it, and its parameters."""

from collections.abc import Callable
from dataclasses import dataclass

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

from gpext import likelihoods
from gpext.inference import CAVI, EP, KL, Laplace, Taylor
from tests.members import F64, MEMBERS

RULES = {
    "kl": KL(tolerance=1e-9),
    "laplace": Laplace(tolerance=1e-9),
    "taylor": Taylor(),
    "cavi": CAVI(max_steps=5000, tolerance=1e-10),
    "ep": EP(tolerance=1e-9),
}


@dataclass(frozen=True)
class Case:
    """One likelihood in float64."""

    make: Callable
    targets: Callable  # (generator, n) -> targets
    rules: tuple
    num_latents: int | None = None
    scales: tuple | None = None  # of the prior covariances of several latents

    def problem(self, n, *, seed=0, lengthscale=0.7, outputscale=1.3, mean=0.1):
        """A likelihood, a prior with its parameters, and targets."""
        generator = torch.Generator().manual_seed(seed)
        x = 3 * torch.rand(n, 2, generator=generator, dtype=F64)
        targets = self.targets(generator, n)
        parameters = torch.tensor([lengthscale, outputscale], dtype=F64).log().requires_grad_()
        constant = torch.tensor(mean, dtype=F64, requires_grad=True)
        return self.make(), Prior(x, parameters, constant, self.num_latents, self.scales), targets


@dataclass
class Prior:
    """A prior that can be recomputed after its parameters have changed."""

    x: torch.Tensor
    log_kernel: torch.Tensor
    mean: torch.Tensor
    num_latents: int | None
    scales: tuple | None = None

    def __call__(self):
        lengthscale, outputscale = self.log_kernel.exp()
        K = outputscale * torch.exp(-0.5 * (torch.cdist(self.x, self.x) / lengthscale).square())
        K = K + 1e-6 * torch.eye(len(self.x), dtype=F64)
        mean = self.mean.expand(len(self.x))
        if self.num_latents is not None:  # a different kernel and mean for each latent
            scale = 1 + 0.3 * torch.arange(self.num_latents, dtype=F64)
            K, mean = (
                (scale if self.scales is None else torch.tensor(self.scales)).view(-1, 1, 1) * K,
                scale.view(-1, 1) * mean,
            )
        return MultivariateNormal(mean, to_linear_operator(K))


def binary(generator, n):
    return (torch.rand(n, generator=generator, dtype=F64) < 0.6).to(F64)


def counts(generator, n):
    return torch.poisson(torch.full((n,), 2.0, dtype=F64), generator=generator)


def several_counts(generator, n):
    return torch.poisson(torch.tensor([1.0, 4.0, 0.5], dtype=F64).expand(n, 3), generator=generator)


def real(generator, n):
    return 1.5 * torch.randn(n, generator=generator, dtype=F64)


def unit(generator, n):
    return 0.05 + 0.9 * torch.rand(n, generator=generator, dtype=F64)


def angles(generator, n):
    return 1.5 * torch.randn(n, generator=generator, dtype=F64)


def proportions(num_classes):
    def draw(generator, n):
        return (0.8 * torch.randn(n, num_classes, generator=generator, dtype=F64)).softmax(-1)

    return draw


NOISE = torch.tensor([[1.0, 0.6], [0.6, 2.0]], dtype=F64)


def pairs_of_reals(generator, n):
    return 1.5 * torch.randn(n, 2, generator=generator, dtype=F64)


def family_gaussian():
    """Pairs with correlated noise, its covariance known up to a factor, the dispersion."""
    inverse = torch.linalg.inv(NOISE)

    def log_partition(theta):  # theta = eta, T = NOISE^-1 y
        return 0.5 * torch.einsum("...dn,de,...en->...n", theta, inverse.to(theta), theta)

    def log_base(y, a):
        quadratic = torch.einsum("...nd,de,...ne->...n", y, inverse.to(y), y)
        return -0.5 * quadratic / a - (2 * torch.pi * a).log() - 0.5 * torch.logdet(NOISE)

    return likelihoods.ExponentialFamilyLikelihood(
        2, lambda y: (y @ inverse.to(y)).mT, log_partition, log_base, dispersion=0.4, num_targets=2
    ).double()


def family_beta():
    """Beta(e^f_1, e^f_2), whose link is not canonical."""
    return likelihoods.ExponentialFamilyLikelihood(
        2,
        lambda y: torch.stack([y.log(), (1 - y).log()], -2),
        lambda theta: theta.lgamma().sum(-2) - theta.sum(-2).lgamma(),
        lambda y, a: -y.log() - (1 - y).log(),
        torch.exp,
    )


def classes(num_classes):
    return lambda generator, n: torch.randint(num_classes, (n,), generator=generator).to(F64)


def trials(num_classes, total):
    def draw(generator, n):
        drawn = torch.randint(num_classes, (n, total), generator=generator)
        return torch.nn.functional.one_hot(drawn, num_classes).sum(-2).to(F64)

    return draw


def double(make):
    return lambda: make().double()


def augmented(name, rules=("kl", "laplace", "taylor", "cavi", "ep")):
    member = MEMBERS[name]
    return Case(member.make, lambda generator, n: member.targets(n), rules)


def stock(kind, **values):
    def make():
        likelihood = kind().double()
        likelihood.initialize(**values)
        return likelihood

    return make


def shaped(kind, shape):
    def make():
        likelihood = kind().double()
        likelihood.shape = torch.tensor(shape, dtype=F64)
        return likelihood

    return make


def positive(generator, n):
    return (0.8 * torch.randn(n, generator=generator, dtype=F64)).exp()


def intervals(generator, n):
    """Exact, and censored on the left, on the right and on both sides."""
    y = real(generator, n)
    kind = torch.arange(n) % 4
    lower = torch.where(kind == 1, -torch.inf, torch.where(kind == 3, y - 0.7, y))
    return torch.stack([lower, torch.where(kind == 2, torch.inf, torch.where(kind == 3, y + 0.4, y))], -1)


def censored_gaussian():
    likelihood = likelihoods.Censored(gpytorch.likelihoods.GaussianLikelihood().double())
    likelihood.likelihood.noise = 0.3
    return likelihood


def with_numbers(targets, low, high):
    """Targets with a number between two others behind each."""

    def draw(generator, n):
        y = targets(generator, n)
        return torch.stack([y, low + (high - low) * torch.rand(n, generator=generator, dtype=F64)], -1)

    return draw


def hurdle():
    likelihood = likelihoods.Hurdle(likelihoods.PoissonLikelihood()).double()
    likelihood.zero_probability = torch.tensor(0.3, dtype=F64)
    return likelihood


def mixed():
    members = [likelihoods.PoissonLikelihood(), likelihoods.BernoulliLogitLikelihood()]
    return likelihoods.MixedLikelihood(members)


def mixed_with_angles():
    one_latent = [likelihoods.PoissonLikelihood(), likelihoods.BernoulliLogitLikelihood()]
    return likelihoods.MixedLikelihood([*one_latent, likelihoods.VonMisesLikelihood()])


def of_three_families(generator, n):
    kinds = torch.stack([counts(generator, n).double(), binary(generator, n).double(), angles(generator, n)], -1)
    family = torch.arange(n) % 3
    return torch.stack([kinds.gather(-1, family[:, None]).squeeze(-1), family.double()], -1)


def of_two_families(generator, n):
    return torch.stack([binary(generator, n), (torch.arange(n) % 2).double()], -1)


def tweedie():
    likelihood = likelihoods.TweedieLikelihood().double()
    likelihood.initialize(dispersion=torch.tensor(0.8, dtype=F64), power=torch.tensor(1.6, dtype=F64))
    return likelihood


def amounts(generator, n):
    """A third of them zero."""
    return torch.where(torch.arange(n) % 3 == 1, 0.0, positive(generator, n))


JOINT = ("kl", "laplace", "taylor")
SMOOTH = ("kl", "laplace", "taylor", "ep")
LOG_SCALE = (1.0, 0.05)  # the logarithm of a noise varies less than the location
CASES = {
    "bernoulli_logit": augmented("bernoulli_logit"),
    "negative_binomial": augmented("negative_binomial"),
    "negative_binomial_log": augmented("negative_binomial_log"),
    "student_t": augmented("student_t", ("kl", "laplace", "cavi", "ep")),
    "laplace": augmented("laplace", ("kl", "cavi", "ep")),
    "matern32": augmented("matern32", ("kl", "laplace", "cavi", "ep")),
    "pseudo_huber": augmented("pseudo_huber"),
    "pairwise_logit": Case(likelihoods.PairwiseLogitLikelihood, binary, ("kl", "laplace", "taylor", "cavi", "ep")),
    "pairwise_probit": Case(likelihoods.PairwiseProbitLikelihood, binary, SMOOTH),
    "poisson": Case(likelihoods.PoissonLikelihood, counts, SMOOTH),
    "ordinal_logit": Case(double(lambda: likelihoods.OrdinalLogitLikelihood(4)), classes(4), SMOOTH),
    "ordinal_probit": Case(double(lambda: likelihoods.OrdinalProbitLikelihood(4)), classes(4), SMOOTH),
    "gamma": Case(shaped(likelihoods.GammaLikelihood, 1.7), positive, SMOOTH),
    "weibull": Case(shaped(likelihoods.WeibullLikelihood, 1.7), positive, SMOOTH),
    "log_normal": Case(shaped(likelihoods.LogNormalLikelihood, 0.6), positive, SMOOTH),
    "log_logistic": Case(shaped(likelihoods.LogLogisticLikelihood, 1.7), positive, SMOOTH),
    "tweedie": Case(tweedie, amounts, SMOOTH),
    "pareto": Case(shaped(likelihoods.GeneralizedParetoLikelihood, 0.4), positive, ("kl", "laplace", "ep")),
    "censored": Case(censored_gaussian, intervals, SMOOTH),
    "weighted": Case(
        lambda: likelihoods.Weighted(likelihoods.BernoulliLogitLikelihood()),
        with_numbers(binary, 0.5, 3.0),
        ("kl", "laplace", "taylor", "cavi", "ep"),
    ),
    "offset": Case(lambda: likelihoods.Offset(likelihoods.PoissonLikelihood()), with_numbers(counts, -1, 1), SMOOTH),
    "hurdle": Case(hurdle, counts, SMOOTH),
    "mixed": Case(mixed, of_two_families, SMOOTH),
    "mixed_with_angles": Case(mixed_with_angles, of_three_families, ("kl", "laplace", "taylor", "ep"), num_latents=2),
    "multinomial": Case(lambda: likelihoods.MultinomialLogitLikelihood(3), classes(3), JOINT, num_latents=3),
    "trials": Case(lambda: likelihoods.MultinomialLogitLikelihood(3, 5), trials(3, 5), JOINT, num_latents=3),
    "stick_breaking": Case(lambda: likelihoods.StickBreakingLikelihood(3), classes(3), ("kl",), num_latents=2),
    "several_counts": Case(
        lambda: likelihoods.MultivariatePoissonLikelihood(3), several_counts, ("laplace", "taylor"), num_latents=3
    ),
    "von_mises": Case(likelihoods.VonMisesLikelihood, angles, ("laplace", "taylor", "ep"), num_latents=2),
    "dirichlet": Case(lambda: likelihoods.DirichletLikelihood(3), proportions(3), ("laplace", "taylor"), num_latents=3),
    "beta": Case(likelihoods.BetaLikelihood, unit, ("laplace", "taylor", "ep"), num_latents=2),
    "heteroscedastic": Case(
        likelihoods.HeteroscedasticGaussianLikelihood, real, ("kl", "laplace", "ep"), num_latents=2, scales=LOG_SCALE
    ),
    "heteroscedastic_student_t": Case(
        double(likelihoods.HeteroscedasticStudentTLikelihood),
        real,
        ("kl", "laplace", "ep"),
        num_latents=2,
        scales=LOG_SCALE,
    ),
    "family_gaussian": Case(family_gaussian, pairs_of_reals, ("laplace", "taylor", "ep"), num_latents=2),
    "family_beta": Case(family_beta, unit, ("laplace", "taylor"), num_latents=2),
    "stock_gaussian": Case(stock(gpytorch.likelihoods.GaussianLikelihood, noise=0.3), real, SMOOTH),
    "stock_bernoulli": Case(gpytorch.likelihoods.BernoulliLikelihood, binary, SMOOTH),
    "stock_student_t": Case(
        stock(gpytorch.likelihoods.StudentTLikelihood, deg_free=torch.tensor(4.5, dtype=F64), noise=0.3),
        real,
        ("kl", "laplace", "ep"),
    ),
    "stock_beta": Case(stock(gpytorch.likelihoods.BetaLikelihood, scale=7.0), unit, SMOOTH),
}
if "PoissonLikelihood" in gpytorch.likelihoods.__all__:  # from gpytorch 1.15 on
    CASES["stock_poisson"] = Case(gpytorch.likelihoods.PoissonLikelihood, counts, SMOOTH)
# A general family has no distribution object for p(y | f); the targets of those after it are not values of the
# predicted variable, but several numbers.
NO_DISTRIBUTION = ("stock", "family", "censored", "weighted", "offset", "mixed")
PAIRS = [(name, rule) for name, case in CASES.items() for rule in case.rules]
