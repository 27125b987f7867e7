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
# # Survival analysis with Gaussian processes
#
# A survival time is often known only to be longer than the time a subject was observed: it is *censored*. If the hazard
# is constant within each of a few intervals of time, then survival data are Poisson counts: a subject adds, for every
# interval in which it was at risk, one row with the time that it spent there as exposure and a count of 1 if it died.
# The log hazard may then be any Gaussian process of time and covariates,
#
# $$ h(t \mid x) = e^{f(t_j, x)}, \qquad b_j < t \le b_{j+1}, \qquad f \sim \mathrm{GP}, $$
#
# of which Cox's proportional hazards, $f = \alpha(t) + \beta^\top x$, are one choice of kernel.
#
# The data are 1043 adults with acute myeloid leukemia in north-west England (Henderson, Shimakura and Gorst, JASA
# 2002): place of residence, age, sex, white blood cell count, and a deprivation score. They are read from the folder
# `$GPEXT_DATA`; without it the notebook runs on generated data with as many covariates, and the remarks about patients
# do not apply. Less than a minute.

# %%
import os
import warnings

import gpytorch
import matplotlib.pyplot as plt
import torch
from gpytorch.kernels import AdditiveKernel, LinearKernel, MaternKernel, ProductKernel, ScaleKernel

import gpext
from benchmarks.datasets import raw_table
from gpext import plots, survival
from gpext.likelihoods import Censored, Offset, PoissonLikelihood, WeibullLikelihood

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # the matrices are small
warnings.simplefilter("ignore", gpytorch.utils.warnings.NumericalWarning)  # jitter, as linear kernels have low rank
SMOKE = "GPEXT_SMOKE" in os.environ  # sizes for continuous integration
try:
    data = raw_table("synthetic_survival" if SMOKE else "leukemia")
except FileNotFoundError as error:
    print(error)
    data = raw_table("synthetic_survival")
X, targets = torch.from_numpy(data.features), torch.from_numpy(data.targets)
if SMOKE:
    X, targets = X[:150], targets[:150]
names = ["x", "y", "age", "sex", "log white count", "deprivation"]
order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
test, train = order[: len(X) // 5], order[len(X) // 5 :]
time, event = targets.unbind(-1)
x = (X - X[train].mean(0)) / X[train].std(0)
print(f"{len(X)} subjects, {int(event.sum())} events; median time {time.median():.2f}, longest {time.max():.1f}")

# %% [markdown]
# ## 1. Without a model: Kaplan and Meier
#
# The Kaplan-Meier estimate of the survival function of three groups of ages, with 90 % confidence limits. Most deaths
# happen within the first year, and age makes a large difference.

# %%
AGE = 2
terciles = torch.quantile(X[:, AGE], torch.tensor([1 / 3, 2 / 3]))
group = (X[:, AGE, None] > terciles).sum(-1)
group_names = ["youngest third", "middle third", "oldest third"]
figure, ax = plt.subplots(figsize=(6, 3.8), layout="constrained")
for k, name in enumerate(group_names):
    found = survival.kaplan_meier(time[group == k], event[group == k])
    curve = found.times, found.survival, found.lower, found.upper
    plots.survival_curves(*curve, step=True, labels=[name], colors=[plots.COLORS[k]], ax=ax)
ax.set_xlabel("years since diagnosis")
plt.show()

# %% [markdown]
# ## 2. Survival data as Poisson data
#
# Ten intervals with as many deaths each; `split` makes the table. Its first input is a coordinate of the interval: we
# take the logarithm of its midpoint, because the first intervals are days and the last one is years.
#
# Two models: Cox's, and one whose effects may change with time. Both have few dimensions, 70 for seven functions of ten
# intervals, and a hundred inducing inputs represent them exactly if each interval has ten
# of them that stay there. (More flexible kernels than inducing inputs can
# resolve are a trap here. With a smooth map of the homes, whose lengthscale is short, the sparse prior treats what is
# left of the map as independent noise; its evidence is higher, and the held-out log density is lower.)

# %%
breaks = survival.event_breaks(time[train], event[train], 5 if SMOKE else 10)
breaks[-1] = time.max()  # the test data, too
log_time = (0.5 * (breaks[1:] + breaks[:-1])).log()
coordinates = (log_time - log_time.mean()) / log_time.std()
table = survival.split(time[train], event[train], breaks, covariates=x[train], coordinates=coordinates)
print(f"{len(train)} subjects became {len(table.counts)} rows; breaks at", [round(b, 2) for b in breaks.tolist()])


class LogHazard(gpext.models.LatentGP):
    def __init__(self, table, likelihood, kernel, inducing):
        super().__init__(table.inputs, table.counts, likelihood, inducing_inputs=inducing)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def of_time():
    return ScaleKernel(MaternKernel(2.5, active_dims=(0,)))


def linear():
    return LinearKernel(active_dims=tuple(range(1, 7)), ard_num_dims=6)


proportional = AdditiveKernel(of_time(), linear())  # Cox: a baseline and linear effects
flexible = AdditiveKernel(
    of_time(),
    linear(),
    ProductKernel(of_time(), linear()),  # effects that change with time
)


def trained(kernel):
    likelihood = Offset(PoissonLikelihood(), table.exposure.log())
    inducing = torch.cat([table.inputs[table.interval == j][:10] for j in range(len(coordinates))])
    model = LogHazard(table, likelihood, kernel, inducing)
    model.variational_strategy.sparse_inputs.requires_grad_(False)  # in training they would leave the intervals
    mll = gpext.mlls.LatentMarginalLogLikelihood(likelihood, model)
    steps = 5 if SMOKE else 25
    found = gpext.fit(mll, table.inputs, table.counts, max_steps=steps, initial="data", progress=False)
    print(f"{found.message.split('(')[0].strip()} log evidence {model.result.log_evidence:.1f}")
    return model


cox, model = trained(proportional), trained(flexible)

# %% [markdown]
# The evidence prefers effects that change with time.
#
# ## 3. Predicted survival
#
# `piecewise_hazard` gives the posterior of the hazards of new subjects. Below: three subjects that differ in age alone,
# with 90 % credible limits. The limits are those of the survival *function*; each subject's own time is of course far
# less certain.

# %%
subjects = torch.zeros(3, 6)  # the average subject, but for age
subjects[:, AGE] = torch.stack([x[group == k, AGE].mean() for k in range(3)])
hazards = survival.piecewise_hazard(model, table, subjects)
grid = torch.linspace(0, float(breaks[-2]) * 2, 80).clamp_max(breaks[-1])
generator = torch.Generator().manual_seed(1)
band = hazards.survival(grid, generator=generator)
figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
ages = [f"age {a:.0f}" for a in subjects[:, AGE] * X[train, AGE].std() + X[train, AGE].mean()]
plots.survival_curves(grid, band.mean, band.lower, band.upper, labels=ages, ax=axes[0])
rate = hazards.hazard()
plots.hazard(breaks, rate.median, rate.lower, rate.upper, labels=ages, ax=axes[1])
axes[0].set_xlabel("years since diagnosis")
axes[1].set(xlabel="years since diagnosis", ylabel="hazard, deaths a year", xscale="log")
axes[1].set_xlim(0.5 * float(breaks[1]), None)
plt.show()
median = hazards.quantile_times(0.5, generator=generator)
for name, low, middle, high in zip(ages, median.lower, median.median, median.upper, strict=True):
    print(f"{name}: median survival {middle:.2f} years, 90 % from {low:.2f} to {high:.2f}")

# %% [markdown]
# ## 4. Effects that wear off
#
# The ratio of the hazards of two subjects is log-normal under the posterior; here for one standard deviation more of
# each covariate. A proportional hazards model would draw horizontal lines.

# %%
figure, ax = plt.subplots(figsize=(6, 3.8), layout="constrained")
for color, k in zip(plots.COLORS, (2, 4, 5), strict=False):
    more, less = torch.zeros(6), torch.zeros(6)
    more[k], less[k] = 0.5, -0.5
    inputs = table.inputs_at(torch.stack([more, less])).flatten(0, 1)  # (2 J, 7)
    with torch.no_grad():
        joint = model(inputs)
    J = len(coordinates)
    contrast = torch.cat([torch.eye(J), -torch.eye(J)], 1)
    mean = contrast @ joint.mean
    sd = (contrast @ joint.covariance_matrix @ contrast.mT).diagonal().sqrt()
    ratio = [(mean + z * sd).exp() for z in (0, -1.645, 1.645)]
    plots.hazard(breaks, *ratio, labels=[names[k]], colors=[color], ax=ax)
ax.axhline(1, color=plots.GREY, linewidth=1)
ax.set(xlabel="years since diagnosis", ylabel="hazard ratio of one standard deviation", xscale="log")
ax.set_xlim(0.5 * float(breaks[1]), None)
plt.show()

# %% [markdown]
# The effect of age is largest in the first weeks, and smaller for those who have survived them; that of deprivation is
# small and does not change. A proportional hazards model would average over both.
#
# ## 5. Held out: is it any good?
#
# Against the proportional hazards model, and against a parametric one: Weibull times with a Gaussian process of the log
# scale, in which a censored time is the interval up to infinity. Concordance is the share of comparable pairs of
# subjects that are ranked correctly; the log density also judges how sure the prediction is.


# %%
class LogScale(gpext.models.LatentGP):
    def __init__(self, x, limits, likelihood):
        super().__init__(x, limits, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = LinearKernel(ard_num_dims=6)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


limits = torch.stack([time, torch.where(event == 1, time, torch.inf)], -1)
likelihood = Censored(WeibullLikelihood())
weibull = LogScale(x[train], limits[train], likelihood)
mll = gpext.mlls.LatentMarginalLogLikelihood(likelihood, weibull)
gpext.fit(mll, x[train], limits[train], max_steps=5 if SMOKE else 10, progress=False)

middle = time[train][event[train] == 1].median().reshape(1)
predictions = {
    "proportional hazards": survival.piecewise_hazard(cox, table, x[test]),
    "effects that change": survival.piecewise_hazard(model, table, x[test]),
    "Weibull": survival.parametric_hazard(weibull, likelihood, x[test]),
}
for name, hazard in predictions.items():
    chance = {} if name == "Weibull" else {"generator": torch.Generator().manual_seed(2)}
    risk = hazard.cumulative_hazard(middle, **chance).mean.squeeze(-1)
    with torch.no_grad():
        log_p = hazard.log_density(time[test], event[test], **chance)
    index = survival.concordance_index(time[test], event[test], risk).index
    print(f"{name:22s} log density {log_p.mean():.3f}   concordance {index:.3f}")

# %% [markdown]
# Calibration: test subjects in three groups by predicted risk, the mean of their predicted survival functions (lines)
# against the Kaplan-Meier estimate of what happened (steps, with 90 % limits).

# %%
hazard = predictions["effects that change"]
risk = hazard.cumulative_hazard(middle, generator=generator).mean.squeeze(-1)
thirds = torch.bucketize(risk, torch.quantile(risk, torch.tensor([1 / 3, 2 / 3])))
mean = hazard.survival(grid, generator=generator).mean
figure, ax = plt.subplots(figsize=(6, 3.8), layout="constrained")
for k, name in enumerate(["lowest risk", "middle", "highest risk"]):
    members, color = test[thirds == k], [plots.COLORS[k]]
    found = survival.kaplan_meier(time[members], event[members])
    seen = found.times, found.survival, found.lower, found.upper
    plots.survival_curves(*seen, step=True, colors=color, ax=ax)
    plots.survival_curves(grid, mean[thirds == k].mean(0), labels=[name], colors=color, ax=ax)
ax.set(xlabel="years since diagnosis", xlim=(0, float(grid[-1])))
plt.show()
