# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Counts: too many zeros, too much spread, and exposure
#
# A Gaussian process for counts has a log link: $e^{f(x)}$ is the expected count. Which distribution the count has
# about that mean is a choice of its own, and predictions of single counts depend on it more than on the process. This
# notebook makes the choice on two data sets:
#
# 1. visits of 4406 elderly people to a physician's office, with 13 covariates [Deb & Trivedi 1997]: the variance is
#    eight times the mean, and every seventh person made no visit;
# 2. drownings in Finland by month, 2002 to 2012: a trend, a season, and months of 28 to 31 days, a known exposure.
#
# The data are read from the folder `$GPEXT_DATA`; where it is not set, counts of the same kind are generated. Less
# than a minute.

# %%
import copy
import os

import gpytorch
import matplotlib.pyplot as plt
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import PeriodicKernel, RBFKernel, ScaleKernel
from torch import Tensor

import gpext
from benchmarks.datasets import raw_table
from gpext import plots
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    Hurdle,
    NegativeBinomialLogLikelihood,
    Offset,
    PoissonLikelihood,
    Truncated,
    ZeroInflated,
)
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.variational import SiteVariationalStrategy, kmeans_inducing_points

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # the matrices are small
torch.manual_seed(0)
SMOKE = "GPEXT_SMOKE" in os.environ  # sizes for continuous integration
HAS_DATA = "GPEXT_DATA" in os.environ


def generated_visits(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return covariates and over-dispersed counts, some of them zero for another reason."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 5))
    x[:, 2] = rng.poisson(1.5, n)
    mean = np.exp(1.3 + 0.3 * x[:, 0] + 0.25 * x[:, 2])
    y = rng.negative_binomial(1.2, 1.2 / (1.2 + mean))
    return x, np.where(rng.random(n) < 0.05, 0, y).astype(float)


def generated_months(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return years, months and counts that fall slowly and peak in July."""
    rng = np.random.default_rng(0)
    t = np.arange(n)
    rate = np.exp(2.4 - 0.003 * t + 0.9 * np.cos(2 * np.pi * (t - 6) / 12))
    return 2002 + t // 12, 1 + t % 12, rng.poisson(rate).astype(float)


# %% [markdown]
# ## 1. Visits to a physician
#
# There is no exposure in these data: all were asked about the same period. A fifth is kept for testing.

# %%
if HAS_DATA:
    table = raw_table("nmes")
    features, visits = table.features, table.targets
else:
    features, visits = generated_visits(200 if SMOKE else 4406)
CHRONIC = 2  # the column of chronic conditions
order = np.random.default_rng(1).permutation(len(visits))[: 200 if SMOKE else None]
num_test = len(order) // 5
centre, scale = features[order[num_test:]].mean(0), features[order[num_test:]].std(0)
inputs = torch.from_numpy((features - centre) / scale)
test_x, test_y = inputs[order[:num_test]], torch.from_numpy(visits[order[:num_test]])
train_x, train_y = inputs[order[num_test:]], torch.from_numpy(visits[order[num_test:]])
zeros = (train_y == 0).double().mean()
print(f"{len(train_y)} people, mean {train_y.mean():.2f}, variance {train_y.var():.1f}, {zeros:.1%} without a visit")

# %% [markdown]
# Five families, from the simplest on. A Poisson count has the variance $\mu$; a negative binomial one $\mu + \alpha
# \mu^2$. `ZeroInflated` adds zeros of another origin with a constant probability. A `Hurdle` separates "any visit?"
# from "how many?"; its zeros say nothing about $f$. Its constant probability of a zero is a strong assumption, which
# goes if the two questions get a process each: a `BernoulliLogitLikelihood` of "any?" on all people, and a count that
# is `Truncated` to at least one on those with visits.
#
# With thousands of data the process has inducing points; `gpext.fit` trains $q(u)$ by natural gradients, here on
# minibatches. The composition of a likelihood changes nothing about that.


# %%
class Model(gpytorch.models.ApproximateGP):
    def __init__(self, x: Tensor, constant: float) -> None:
        z = kmeans_inducing_points(x, 10 if SMOKE else 50)
        super().__init__(SiteVariationalStrategy(self, z, learn_inducing_locations=False))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=x.size(-1)))
        self.mean_module.constant.data.fill_(constant)
        self.covar_module.outputscale, self.covar_module.base_kernel.lengthscale = 0.3, x.size(-1) ** 0.5

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def trained(likelihood, x: Tensor, y: Tensor, start: Model | float, steps: int = 150) -> Model:
    if isinstance(start, Model):
        model = copy.deepcopy(start)
    else:
        model = Model(x, start)
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    gpext.fit(mll, x, y, batch_size=256, max_steps=5 if SMOKE else steps, progress=False)
    return model


start = float(train_y.mean().log())
families = {"Poisson": PoissonLikelihood(), "negative binomial": NegativeBinomialLogLikelihood()}
models = {name: trained(likelihood, train_x, train_y, start) for name, likelihood in families.items()}

# What is made of the negative binomial starts from it: its integrals over f are numerical, and steps take longer.
simple, from_simple = families["negative binomial"], models["negative binomial"]
families["zero-inflated NB"] = ZeroInflated(copy.deepcopy(simple)).initialize(zero_probability=0.05)
families["hurdle NB"] = Hurdle(copy.deepcopy(simple)).initialize(zero_probability=float(zeros))
for name in ("zero-inflated NB", "hurdle NB"):
    models[name] = trained(families[name], train_x, train_y, from_simple, steps=40)
any_visit, how_many = BernoulliLogitLikelihood(), Truncated(copy.deepcopy(simple), lower=1)
some = train_y > 0
of_any = trained(any_visit, train_x, some.double(), 1.7)
of_number = trained(how_many, train_x[some], train_y[some], from_simple, steps=40)

with torch.no_grad():
    scores = {name: families[name].log_marginal(test_y, models[name](test_x)) for name in families}
    visited = test_y > 0
    number = how_many.log_marginal(test_y.clamp_min(1), of_number(test_x))
    of_visit = any_visit.log_marginal(visited.double(), of_any(test_x))
    scores["two processes"] = of_visit + torch.where(visited, number, 0.0)

reference = scores["negative binomial"]
for name, score in scores.items():
    gap = score - reference
    error = gap.std() / len(gap) ** 0.5
    print(f"{name:20s} held-out log density {score.mean():7.4f}, over NB {gap.mean():+.4f} +- {error:.4f}")
for name in ("zero-inflated NB", "hurdle NB"):
    print(f"{name}: probability of a further zero {families[name].zero_probability.item():.3f}")

# %% [markdown]
# On the visits, the step from Poisson to negative binomial is worth a nat for each person. Extra zeros gain nothing:
# zero inflation loses 0.01, a hurdle of constant probability 0.03, as the zeros depend on the covariates, and two
# processes come out level with the negative binomial. The figure shows why: it compares the observed number of each
# count, as square roots (a hanging rootogram), with the expected one, the sum of the predictive probabilities over 400
# people of the test set.

# %%
counts, people = torch.arange(0.0, 21.0), slice(None, 400)


def expected_frequencies(likelihood, model) -> Tensor:
    with torch.no_grad():
        latent = model(test_x[people])
        of_count = [likelihood.log_marginal(k.expand(latent.mean.shape), latent).exp().sum() for k in counts]
        return torch.stack(of_count)


observed = torch.stack([(test_y[people] == k).double().sum() for k in counts])
expected = {name: expected_frequencies(likelihood, models[name]) for name, likelihood in families.items()}
figure, axes = plt.subplots(1, 4, figsize=(14, 3.6), sharey=True, layout="constrained")
for ax, (name, frequency), color in zip(axes, expected.items(), plots.COLORS, strict=False):
    ax.bar(counts, observed.sqrt(), bottom=(frequency.sqrt() - observed.sqrt()), color=color, alpha=0.5, width=0.8)
    ax.plot(counts, frequency.sqrt(), color="black", marker=".", linewidth=1)
    ax.axhline(0, color=plots.GREY, linewidth=1)
    ax.set(title=name, xlabel="visits")
axes[0].set_ylabel("square root of the number of people")
plt.show()

# %% [markdown]
# Bars hang from the expected numbers and end at zero where the two agree. The Poisson model expects far too few people
# without a visit. The negative binomial, over-dispersed as it is, already expects as many as there are.
#
# Calibration of a single prediction: for counts the probability integral transform is randomised, $u = F(y - 1) +
# v\,p(y)$ with $v$ uniform, which makes it uniform if the prediction is right.


# %%
def randomised_pit(likelihood, latent: MultivariateNormal, y: Tensor, generator: torch.Generator) -> Tensor:
    with torch.no_grad():
        predictive = likelihood.marginal(latent)
        upper, mass = predictive.cdf(y), predictive.log_prob(y).exp()
        v = torch.rand(y.shape, generator=generator)
        return (upper - v * mass).clamp(0, 1)


figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
for name, color in (("Poisson", plots.RED), ("negative binomial", plots.BLUE), ("hurdle NB", plots.ORANGE)):
    generator = torch.Generator().manual_seed(0)
    pit = randomised_pit(families[name], models[name](test_x[people]), test_y[people], generator)
    plots.pit_histogram(pit, ax=axes[0], label=name, color=color)
    plots.coverage(pit, ax=axes[1], label=name, color=color)
axes[0].legend(fontsize=8)
axes[1].legend(fontsize=8)
plt.show()

# %% [markdown]
# The U of the Poisson model means intervals that are far too narrow. Those of the negative binomial families hold a
# little more than they should.
#
# What the process has learnt: the expected number of visits of a person with median covariates, by the number of
# chronic conditions.

# %%
conditions = torch.arange(0.0, 8.0)
person = train_x.median(0).values.repeat(len(conditions), 1)
person[:, CHRONIC] = (conditions - centre[CHRONIC]) / scale[CHRONIC]
with torch.no_grad():
    latent = models["negative binomial"](person)
    predictive = families["negative binomial"].marginal(latent)
    mean = (latent.mean + 0.5 * latent.variance).exp()
    band = [(latent.mean + z * latent.stddev).exp() for z in (-1.96, 1.96)]
    wide = [predictive.icdf(torch.tensor(q)) for q in (0.1, 0.9)]
ax = plots.predictive_band(
    conditions, mean, *band, label="expected visits", band_label="95 % of the posterior of the expectation"
)
ax.fill_between(conditions, *wide, color=plots.GREY, alpha=0.15, linewidth=0, label="80 % of new people")
ax.set(xlabel="chronic conditions", ylabel="visits", title="a person with median covariates")
ax.legend(fontsize=8, loc="upper left")
plt.show()

# %% [markdown]
# ## 2. Drownings by month
#
# A month's expected number is proportional to its days. `Offset` adds the logarithm of a known exposure to $f$, so
# that $e^f$ is a rate: here of drownings in 30 days. $f$ is the sum of a smooth trend and a season that may change
# slowly from year to year. The last two years are forecast.

# %%
if HAS_DATA:
    table = raw_table("drowning")
    year, month, _ = table.features.T
    drowned = table.targets
else:
    year, month, drowned = generated_months(60 if SMOKE else 129)
DAYS = np.array([31, 28.25, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])
t = torch.from_numpy(year - 2002 + (month - 0.5) / 12)  # in years
y, exposure = torch.from_numpy(drowned), torch.from_numpy(DAYS[month.astype(int) - 1] / 30).log()
past = t < t.max() - 2


class Monthly(gpext.models.LatentGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.trend, self.season = ScaleKernel(RBFKernel()), ScaleKernel(PeriodicKernel() * RBFKernel())
        self.mean_module.constant.data.fill_(float(y.mean().log()))
        self.trend.base_kernel.lengthscale, self.trend.outputscale = 5.0, 0.1
        periodic, slow = self.season.base_kernel.kernels
        periodic.period_length, periodic.lengthscale, slow.lengthscale = 1.0, 1.0, 20.0
        periodic.raw_period_length.requires_grad_(False)

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.trend(x) + self.season(x))


monthly = {}
for name, inner in (("Poisson", PoissonLikelihood()), ("negative binomial", NegativeBinomialLogLikelihood())):
    likelihood = Offset(inner, exposure[past])
    model = Monthly(t[past], y[past], likelihood)
    mll = LatentMarginalLogLikelihood(likelihood, model)
    outcome = gpext.fit(mll, t[past], y[past], max_steps=5 if SMOKE else 60, progress=False)
    monthly[name] = model.eval()
    with torch.no_grad():
        ahead = Offset(inner, exposure[~past]).log_marginal(y[~past], model(t[~past])).mean()
        evidence = float(past.sum()) * outcome.objective
    print(f"{name:18s} log evidence {evidence:8.2f}, log density of a month ahead {ahead:.3f}")
print(
    f"dispersion of the negative binomial: {monthly['negative binomial'].likelihood.likelihood.dispersion.item():.3f}"
)

# %% [markdown]
# Trend and season do not explain all of the spread: on the drownings the negative binomial, of dispersion 0.08, has a
# log evidence that is higher by 15, and 0.14 nats more for each month ahead. Predictions of counts need the exposure of
# their own month.

# %%
model = monthly["negative binomial"]
with torch.no_grad():
    predictive = model.likelihood.marginal(model(t), offset=exposure)
    low, middle, high = (predictive.icdf(torch.tensor(q)) for q in (0.025, 0.5, 0.975))
figure, ax = plt.subplots(figsize=(11, 4), layout="constrained")
plots.predictive_band(2002 + t, middle, low, high, ax=ax, band_label="95 % of new months")
plots.observations(2002 + t, y, ax=ax, label="observed")
ax.axvline(
    2002 + float(t[past].max()) + 1 / 24, color=plots.GREY, linestyle="--", linewidth=1, label="forecast from here"
)
ax.set(xlabel="year", ylabel="drownings in a month", xlim=(2002, 2002 + float(t.max())))
ax.set_ylim(top=1.3 * float(high.max()))
ax.legend(loc="upper right", ncols=4, fontsize=8)
plt.show()


# %% [markdown]
# The posterior of each summand of $f$ alone: with $u = K^{-1} (E f - \mu)$ of the training inputs its mean at $x_*$ is
# $K_j(x_*, X) u$, and its covariance $K_j(x_*, x_*) - K_j(x_*, X) R K_j(X, x_*)$ with the response
# $R = (K + T^{-1})^{-1}$ of the posterior. Once the spread of single months is accounted for, no trend is left on the
# drownings: its outputscale has been trained to nearly zero.


# %%
def summand(kernel, x: Tensor) -> tuple[Tensor, Tensor]:
    conditioned = model.result.conditioned
    cross = kernel(x.unsqueeze(-1), t[past].unsqueeze(-1)).to_dense()
    own = kernel(x.unsqueeze(-1), diag=True)
    variance = own - ((cross @ conditioned.response) * cross).sum(-1)
    return cross @ conditioned.weights, variance.clamp_min(0).sqrt()


with torch.no_grad():
    years, year_day = torch.linspace(0, float(t.max()), 200), torch.linspace(4, 5, 120)
    trend, season = summand(model.trend, years), summand(model.season, year_day)
    level = model.mean_module.constant.exp()
figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
for ax, x, (mean, sd) in ((axes[0], 2002 + years, trend), (axes[1], 12 * (year_day - 4), season)):
    edges = [(mean + z * sd).exp() for z in (-1.96, 1.96)]
    plots.predictive_band(x, mean.exp(), *edges, ax=ax, label="factor", band_label="95 % of its posterior")
    ax.axhline(1, color=plots.GREY, linewidth=1)
low, high = axes[0].get_ylim()
axes[0].set_ylim(min(low, 0.8), max(high, 1.25))
axes[0].set(xlabel="year", ylabel="factor on the rate", title=f"trend, of {level:.1f} in 30 days")
axes[1].set(xlabel="month of 2006", ylabel="factor on the rate", title="season", xlim=(0, 12))
plt.show()

# %%
generator = torch.Generator().manual_seed(0)
figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
with torch.no_grad():
    for part, name, color in ((past, "fitted months", plots.BLUE), (~past, "months ahead", plots.ORANGE)):
        predictive = model.likelihood.marginal(model(t[part]), offset=exposure[part])
        upper, mass = predictive.cdf(y[part]), predictive.log_prob(y[part]).exp()
        pit = (upper - torch.rand(mass.shape, generator=generator) * mass).clamp(0, 1)
        plots.coverage(pit, ax=axes[1], label=name, color=color)
        if name == "fitted months":
            plots.pit_histogram(pit, ax=axes[0], label=name, color=color)
for ax in axes:
    ax.legend(fontsize=8)
plt.show()

# %% [markdown]
# On the drownings the fitted months are calibrated, and of the months ahead the central intervals hold too few: 2011
# has 125 drownings, the other complete years have 149 to 182, and a season alone does not foresee that.
