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
# # Data on linear functions of f: preferences and sums
#
# A Gaussian process describes a function $f$, and often no datum is a value of $f$ at one input. A guest prefers one
# dish to another, and says something of $f(a) - f(b)$. A meter shows the sum of a month, a census the average of a
# district. All of these depend on
#
# $$ h = A f, \qquad p(h) = N(A \mu, A K A^\top), \qquad \mathrm{cov}(f_*, h) = K_{*X} A^\top, $$
#
# with a sparse matrix $A$ of a row for each datum. In gpext $A$ is a *design*: `LatentGP(..., design=A)` and
# `gpext.fit(..., design=A)` serve it under every rule of inference, and predictions are of $f$ itself, at any input.
# All data below are generated, so that the truth is known.

# %%
import os

import gpytorch
import matplotlib.pyplot as plt
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel

import gpext
from gpext import designs, plots
from gpext.inference import EP
from gpext.likelihoods import PairwiseLogitLikelihood, PairwiseProbitLikelihood, StudentTLikelihood
from gpext.mlls import AugmentedELBO, LatentMarginalLogLikelihood
from gpext.models import LatentGP
from gpext.variational import SiteVariationalStrategy, kmeans_inducing_points

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
torch.manual_seed(0)
SMOKE = "GPEXT_SMOKE" in os.environ  # sizes for continuous integration

# %% [markdown]
# ## 1. Which dish is preferred?
#
# Sixty dishes have four properties: how oily, how sweet, how rare and how expensive they are, each from 0 to 1. Guests
# are shown two of them and choose one. Each choice compares utilities with unit normal noise, Thurstone's model: a row
# $(a, b)$ of `index` and the outcome 1 if $a$ was chosen, 0 if $b$ was.

# %%
num_dishes, num_choices = (20, 100) if SMOKE else (60, 900)
dishes = torch.rand(num_dishes, 4)


def taste(x):
    oily, sweet, rare, price = x.unbind(-1)
    return 3 * torch.exp(-((oily - 0.65) ** 2) / 0.05) + 1.5 * rare - 1.5 * price * (1 - rare) - sweet


def choices(number):
    first = torch.randint(num_dishes, (number,))
    second = (first + torch.randint(1, num_dishes, (number,))) % num_dishes
    utility = taste(dishes)
    noise = torch.randn(number, 2)
    chosen = utility[first] + noise[:, 0] > utility[second] + noise[:, 1]
    return torch.stack([first, second], -1), chosen.double()


index, chosen = choices(num_choices)


class Utilities(LatentGP):
    def __init__(self, x, outcomes, index):
        design = designs.pairs(index, len(x))
        super().__init__(x, outcomes, PairwiseProbitLikelihood(), EP(), design=design)
        self.mean_module = gpytorch.means.ZeroMean()  # a constant has no effect on a comparison
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=x.size(-1)))

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


model = Utilities(dishes, chosen, index)
result = gpext.fit(LatentMarginalLogLikelihood(model.likelihood, model), dishes, chosen, progress=False)
print(result.message)
properties = ("oily", "sweet", "rare", "price")
print(dict(zip(properties, model.covar_module.base_kernel.lengthscale[0].tolist(), strict=True)))

# %% [markdown]
# The ladder has the utilities with their intervals, less their average: comparisons cannot say more, and the intervals
# of $f$ itself would be as wide as the prior. The difference from the average is a linear function of $f$, another
# design. Beside the ladder are the predicted probabilities of choices that were not used, against what was chosen:
# points on the diagonal are calibrated.

# %%
with torch.no_grad():
    utilities = model.eval()(dishes)
    new_index, new_chosen = choices(200 if SMOKE else 4000)
    probability = model.likelihood.win_probability(utilities, new_index)
    less_average = designs.rows_of(torch.eye(num_dishes) - 1 / num_dishes)(utilities)

figure, axes = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
plots.preference_ladder(
    less_average.mean, less_average.stddev, truth=taste(dishes), max_items=16, names=range(num_dishes), ax=axes[0]
)
plots.reliability(new_chosen, probability, ax=axes[1])
axes[0].set_title("dishes")
axes[1].set_title("new choices")
plt.show()

# %% [markdown]
# `win_probability` without an index has all pairs. It takes the correlation of two utilities into account, which
# intervals on a ladder cannot show: dishes that are much alike are better told apart than their intervals suggest.

# %%
with torch.no_grad():
    best = utilities.mean.argsort(descending=True)[:10]
    top = MultivariateNormal(utilities.mean[best], utilities.covariance_matrix[best][:, best])
    matrix = model.likelihood.win_probability(top)
figure, ax = plt.subplots(figsize=(5.6, 4.6), layout="constrained")
image = ax.imshow(matrix, cmap="PuOr", vmin=0, vmax=1)
ax.set_xticks(range(len(best)), best.tolist())
ax.set_yticks(range(len(best)), best.tolist())
ax.set_xlabel("to this dish")
ax.set_ylabel("probability that this dish is preferred")
figure.colorbar(image, ax=ax)
plt.show()

# %% [markdown]
# ## 2. Many guests, who differ
#
# What is liked may depend on who chooses. Here older guests like oily dishes less. The age becomes one more input: a
# choice compares $f(a, \text{age})$ with $f(b, \text{age})$, two inputs of their own. There are now thousands of
# choices among all kinds of dishes, and a model with inducing points trains on minibatches of them. The logit link is
# the Bradley-Terry model; with its augmentation every step is in closed form.

# %%
number = 600 if SMOKE else 20_000
age = torch.rand(number)  # from the youngest to the oldest
shown = torch.rand(number, 2, 4)


def taste_of(x, age):
    return taste(x) - 4 * x[..., 0] * age


outcome = torch.bernoulli(torch.sigmoid(taste_of(shown[:, 0], age) - taste_of(shown[:, 1], age)))
x = torch.cat([shown, age[:, None, None].expand(-1, 2, 1)], -1).view(-1, 5)  # both inputs of each choice
design = designs.pairs(torch.arange(2 * number).view(-1, 2), 2 * number)


class ManyUtilities(gpytorch.models.ApproximateGP):
    def __init__(self, inducing_points):
        super().__init__(SiteVariationalStrategy(self, inducing_points))
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=5))

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


likelihood = PairwiseLogitLikelihood()
many = ManyUtilities(kmeans_inducing_points(x, 20 if SMOKE else 150))
many.covar_module.base_kernel.lengthscale = 0.5
mll = AugmentedELBO(likelihood, many, num_data=number)
result = gpext.fit(mll, x, outcome, design=design, batch_size=500, max_steps=20 if SMOKE else None, progress=False)
print(result.message)

# %% [markdown]
# Utility along the oiliness of an otherwise average dish, at two ages, with the truth dashed. Each curve is less its
# value at one half: its level is not in the data, and neither is a comparison of the two ages.

# %%
oily = torch.linspace(0, 1, 61)
figure, ax = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
for years, color, name in ((0.1, plots.BLUE, "young"), (0.9, plots.ORANGE, "old")):
    at = torch.full((61, 5), 0.5)
    at[:, 0], at[:, 4] = oily, years
    with torch.no_grad():
        against = designs.pairs(torch.stack([torch.arange(61), torch.full((61,), 61)], -1), 62)
        curve = against(many(torch.cat([at, at[30:31]])))  # f(x) - f(the dish in the middle)
        sd = curve.variance.sqrt()
    plots.predictive_band(
        oily, curve.mean, curve.mean - 2 * sd, curve.mean + 2 * sd, ax=ax, color=color, label=name, band_label=""
    )
    truth = taste_of(at[:, :4], torch.tensor(years))
    ax.plot(oily, truth - truth[30], "--", color=color)
ax.set_xlabel("oily")
ax.set_ylabel("utility, less that of the dish in the middle")
plt.show()

# %% [markdown]
# ## 3. From monthly totals to days
#
# A meter is read at irregular times, and shows what was used since the reading before. The daily use varies with the
# weekday and slowly over the year. A design of sums has a row for each reading; one reading was written down wrongly,
# so the noise is Student-t. (Sums of $f$ itself have to be what is observed. The total of a count with rate $e^f$ is no
# linear function of $f$.)

# %%
days = torch.arange(60.0 if SMOKE else 240.0).unsqueeze(-1)
use = 8 + 3 * torch.cos(2 * torch.pi * days[:, 0] / 365) + 1.2 * torch.sin(2 * torch.pi * days[:, 0] / 45)
use = use + 0.8 * (days[:, 0] % 7 >= 5)
ends = torch.cumsum(torch.randint(3, 12, (100,)), 0)
period = torch.bucketize(days[:, 0], ends.double(), right=True)
A = designs.sums(period)
total = A.times(use) + torch.randn(A.num_data)
wrong = 4
total[wrong] += 60


class DailyUse(LatentGP):
    def __init__(self, x, y, design):
        super().__init__(x, y, StudentTLikelihood(), design=design)
        self.mean_module = gpytorch.means.ConstantMean()
        weekday = PeriodicKernel()
        weekday.period_length = 7.0
        weekday.raw_period_length.requires_grad_(False)
        self.covar_module = ScaleKernel(MaternKernel(nu=2.5)) + ScaleKernel(weekday)
        self.covar_module.kernels[0].base_kernel.lengthscale = 20.0
        self.mean_module.constant = (y.sum() / len(x)).item()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


daily = DailyUse(days, total, A)
result = gpext.fit(LatentMarginalLogLikelihood(daily.likelihood, daily), days, total, progress=False)
print(result.message)
with torch.no_grad():
    f = daily.eval()(days)
    sums = A(f)  # the same design at the posterior: what the readings should have been
    print(f"reading {wrong}: {total[wrong]:.0f} written down, {sums.mean[wrong]:.0f} expected")

figure, ax = plt.subplots(figsize=(9, 4.2), layout="constrained")
sd = f.stddev
plots.predictive_band(
    days[:, 0], f.mean, f.mean - 2 * sd, f.mean + 2 * sd, ax=ax, label="posterior of a day", band_label="95 %"
)
ax.plot(days[:, 0], use, "--", color=plots.GREY, linewidth=1.2, label="truth")
length = torch.bincount(period).double()
ax.step(days[:, 0], (total / length)[period], where="mid", color=plots.RED, linewidth=1, label="readings, per day")
ax.set_xlabel("day")
ax.set_ylabel("use (kWh)")
ax.set_ylim(3, 16)
ax.legend(ncols=2)
plt.show()

# %% [markdown]
# ## 4. From districts to a map
#
# The average of a quantity is known for each district of a map, and a few stations measure it at a place. Both are
# rows of one design: averages over the cells of a district, and single cells. Their noise differs, which a noise of its
# own for each family of data expresses: a `MixedLikelihood`.

# %%
side, blocks = (12, 4) if SMOKE else (30, 5)
line = (torch.arange(side) + 0.5) / side
cells = torch.cartesian_prod(line, line)
truth = torch.sin(5 * cells[:, 0]) + torch.cos(4 * cells[:, 0] * cells[:, 1]) + cells[:, 1]
district = (cells[:, 0] * blocks).long() * blocks + (cells[:, 1] * blocks).long()
areas = designs.averages(district)
stations = torch.randperm(len(cells))[:6]
rows = torch.cat([areas.rows, areas.num_data + torch.arange(6)])
both = designs.Design(
    rows,
    torch.cat([areas.columns, stations]),
    torch.cat([areas.weights, torch.ones(6)]),
    (areas.num_data + 6, len(cells)),
)
family = (torch.arange(both.num_data) >= areas.num_data).long()
y = both.times(truth) + torch.tensor([0.05, 0.2])[family] * torch.randn(both.num_data)


class Map(LatentGP):
    def __init__(self, x, y, design, family):
        noise = [gpytorch.likelihoods.GaussianLikelihood() for _ in range(2)]
        super().__init__(x, y, gpext.likelihoods.MixedLikelihood(noise, family), design=design)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(RBFKernel())

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


fine = Map(cells, y, both, family)
fine.covar_module.base_kernel.lengthscale = 0.3
result = gpext.fit(LatentMarginalLogLikelihood(fine.likelihood, fine), cells, y, progress=False, max_steps=40)
print(result.message)
with torch.no_grad():
    mean = fine.eval()(cells).mean
figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
for ax, values, title in zip(
    axes, (y[: areas.num_data][district], mean, truth), ("observed averages", "posterior mean", "truth"), strict=True
):
    image = ax.imshow(values.view(side, side).mT, origin="lower", extent=(0, 1, 0, 1), vmin=-1, vmax=3)
    ax.set_title(title)
    ax.set_xlabel("$x_1$")
axes[0].set_ylabel("$x_2$")
axes[1].plot(*cells[stations].mT, "o", color="white", markeredgecolor="black", label="stations")
axes[1].legend()
figure.colorbar(image, ax=axes)
plt.show()
error = (mean - truth).square().mean().sqrt()
print(f"root mean square error: {error:.3f}; of the averages {(y[district] - truth).square().mean().sqrt():.3f}")
