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
# # Point processes: where do trees grow?
#
# A log-Gaussian Cox process is a Poisson process of intensity $\lambda(s) = e^{f(s)}$ with a Gaussian process $f$. On
# a grid its data are counts, $n_c \sim \mathrm{Poisson}(A_c e^{f_c})$ with $A_c$ the area of cell $c$ inside the
# window of observation: a `LatentGP` with `Offset(PoissonLikelihood(), areas.log())`. `gpext.point_process` makes the
# counts, and turns the posterior of $f$ into maps of the intensity.
#
# Two data sets, read from the folder `$GPEXT_DATA`: 195 redwood seedlings in a square (Strauss, Biometrika 1975), and
# 3604 trees of the species *Beilschmiedia pendula* on 50 hectares of Barro Colorado Island (Hubbell and Foster 1983;
# Moller and Waagepetersen 2007). Without the folder the notebook runs on simulated points, and the remarks about trees
# do not apply. Less than a minute.

# %%
import os

import gpytorch
import matplotlib.pyplot as plt
import torch
from gpytorch.kernels import AdditiveKernel, LinearKernel, MaternKernel, ScaleKernel

import gpext
from benchmarks.datasets import raw_table
from gpext import plots
from gpext.likelihoods import Offset, PoissonLikelihood
from gpext.point_process import Grid, intensity, polygon_fractions

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # the matrices are small
SMOKE = "GPEXT_SMOKE" in os.environ  # sizes for continuous integration
generator = torch.Generator().manual_seed(0)


def simulated_points(number):
    """Points in the unit square whose density has three humps."""
    centres = torch.tensor([[0.2, 0.7], [0.7, 0.3], [0.8, 0.85]])
    places = centres[torch.randint(3, (2 * number,), generator=generator)]
    places = places + 0.1 * torch.randn(2 * number, 2, generator=generator)
    return places[((places > 0) & (places < 1)).all(-1)][:number]


def redwoods():
    if SMOKE:
        return simulated_points(100)
    try:
        return torch.from_numpy(raw_table("redwood").targets)
    except FileNotFoundError as error:
        print(error)
        return simulated_points(195)


class LogIntensity(gpext.models.LatentGP):
    def __init__(self, x, counts, likelihood, kernel, **options):
        super().__init__(x, counts, likelihood, **options)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def trained(x, counts, exposure, kernel, max_steps, **options):
    likelihood = Offset(PoissonLikelihood(), exposure.log())
    model = LogIntensity(x, counts, likelihood, kernel, **options)
    model.mean_module.constant.data.fill_(float((counts.sum() / exposure.sum()).log()))
    mll = gpext.mlls.LatentMarginalLogLikelihood(likelihood, model)
    found = gpext.fit(mll, x, counts, max_steps=4 if SMOKE else max_steps, progress=False)
    print(f"{found.message.split('(')[0].strip()} log evidence {model.result.log_evidence:.1f}")
    return model


# %% [markdown]
# ## 1. Redwood seedlings
#
# They stand in clusters, around old stumps. A Matern-3/2 process on a grid of 20 by 20 cells, exact inference (KL).

# %%
points = redwoods()
cells = (8, 8) if SMOKE else (20, 20)
grid = Grid.regular([(0, 1), (0, 1)], cells)
counts = grid.count(points)
kernel = ScaleKernel(MaternKernel(1.5))
kernel.base_kernel.lengthscale = 0.2
model = trained(grid.inputs, counts, grid.exposure, kernel, 25)
print(f"lengthscale {kernel.base_kernel.lengthscale.item():.3f}, variance {kernel.outputscale.item():.2f}")
found = intensity(model, grid)
average = float(counts.sum() / grid.exposure.sum())

figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
plots.intensity(grid.edges, grid.place(found.mean), points=points, ax=axes[0])
plots.intensity(grid.edges, grid.place(found.stddev), kind="sd", ax=axes[1])
name = f"P(more than {2 * average:.0f} per unit of area)"
plots.intensity(grid.edges, grid.place(found.exceedance(2 * average)), kind="exceedance", label=name, ax=axes[2])
plt.show()
total = found.expected_count()
print(
    f"{len(points)} points; expected {total.mean:.1f}, standard deviation of a new number {total.variance.sqrt():.1f}"
)

# %% [markdown]
# The third map answers a question: where is the intensity more than twice its average? Numbers in a region have a
# closed-form mean and variance, in which the uncertain intensity and the Poisson noise are separate.
#
# ## 2. A hole in the window
#
# Suppose that an octagon in the middle could not be searched. It belongs to no cell: the window is the square less the
# polygon, cells at its border count with the part of their area that is outside. The model predicts how many seedlings
# there are in it.

# %%
angle = 2 * torch.pi * torch.arange(8) / 8
hole = torch.stack([0.5 + 0.22 * angle.cos(), 0.5 + 0.22 * angle.sin()], -1)
in_hole = polygon_fractions(hole, *grid.edges)
window = Grid.of_edges(grid.edges, mask=1 - in_hole)
octagon = Grid.of_edges(grid.edges, polygon=hole)


def inside(p):
    """Whether points are inside the convex polygon."""
    edge = hole.roll(-1, 0) - hole
    side = edge[:, 0] * (p[:, None, 1] - hole[:, 1]) - edge[:, 1] * (p[:, None, 0] - hole[:, 0])
    return (side >= 0).all(-1)


hidden = inside(points)
searched = window.count(points[~hidden])
kernel = ScaleKernel(MaternKernel(1.5))
kernel.base_kernel.lengthscale = 0.2
partial = trained(window.inputs, searched, window.exposure, kernel, 25)
everywhere = intensity(partial, grid)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
shown = intensity(partial, window)
plots.intensity(grid.edges, window.place(shown.mean), points=points[~hidden], outline=hole, ax=axes[0])
plots.intensity(grid.edges, grid.place(everywhere.mean), points=points[hidden], outline=hole, ax=axes[1])
axes[0].set_title("data")
axes[1].set_title("prediction, and what was hidden")
plt.show()
number = intensity(partial, octagon).expected_count()
print(f"hidden: {int(hidden.sum())}; predicted {number.mean:.1f} with standard deviation {number.variance.sqrt():.1f}")
draws = intensity(partial, octagon).draws(4000, generator=generator) @ octagon.exposure
drawn = torch.poisson(draws, generator=generator)
low, high = torch.quantile(drawn, torch.tensor([0.05, 0.95])).tolist()
print(f"90 % of predicted numbers are from {low:.0f} to {high:.0f}")

# %% [markdown]
# ## 3. Trees, slope and height
#
# The second forest comes as counts in 1250 cells of 20 by 20 metres, with two covariates: elevation, and the slope of
# the ground. Areas are in hectares, so that intensities are trees per hectare. A fifth of the cells, in blocks of 100
# by 100 metres, is held out. Three models: linear effects of the covariates; a smooth surface; both. Inference with 200
# inducing inputs.


# %%
def trees():
    """Place in metres, standardised elevation and slope, counts, and the number of cells along each side."""
    if not SMOKE:
        try:
            data = raw_table("bei")
            place, covariates = torch.from_numpy(data.features[:, :2]), torch.from_numpy(data.features[:, 2:])
            covariates = (covariates - covariates.mean(0)) / covariates.std(0)
            return place, covariates, torch.from_numpy(data.targets), (50, 25)
        except FileNotFoundError as error:
            print(error)
    shape = (20, 10)
    forest = Grid.regular([(0, 1000), (0, 500)], shape)
    place = forest.inputs
    covariates = torch.stack([torch.sin(place[:, 0] / 150), torch.cos(place[:, 1] / 90)], -1)
    log_rate = 4 + 0.3 * covariates[:, 0] + 0.6 * covariates[:, 1] + torch.sin(place.sum(-1) / 200)
    return place, covariates, torch.poisson(log_rate.exp() * forest.exposure / 1e4, generator=generator), shape


place, covariates, counts, shape = trees()
forest = Grid.regular([(0, 1000), (0, 500)], shape)
assert torch.equal(forest.inputs, place)
hectares = forest.exposure / 1e4
inputs = torch.cat([place / 100, covariates], -1)  # the unit of length is 100 metres
block = (place // 100)[:, 0] * 5 + (place // 100)[:, 1]
chosen = torch.randperm(50, generator=generator)[:10]
held_out = torch.isin(block, chosen.to(block))


def effects():
    return LinearKernel(active_dims=(2, 3), ard_num_dims=2)


def surface():
    kernel = ScaleKernel(MaternKernel(1.5, active_dims=(0, 1)))
    kernel.base_kernel.lengthscale = 1.0
    return kernel


kernels = {"effects": effects(), "surface": surface(), "both": AdditiveKernel(effects(), surface())}
models = {}
for name, kernel in kernels.items():
    x, y, area = inputs[~held_out], counts[~held_out], hectares[~held_out]
    options = {}
    if name != "effects":
        options["inducing_inputs"] = gpext.variational.kmeans_inducing_points(x, 40 if SMOKE else 200)
    print(f"{name}: ", end="")
    if name == "effects":  # three dimensions
        options["inducing_inputs"] = x[:: len(x) // 10]
    models[name] = trained(x, y, area, kernel, 20, **options)
    with torch.no_grad():
        future = models[name](inputs[held_out])
        pairs = torch.stack([counts[held_out], hectares[held_out].log()], -1)
        log_p = Offset(PoissonLikelihood()).log_marginal(pairs, future)
    print(f"    held-out log probability of a cell {log_p.mean():.3f}")

# %% [markdown]
# The surface does most of the work; the covariates alone explain little of where the trees are. The maps are those of
# both.

# %%
found = intensity(models["both"], forest, inputs)
figure, axes = plt.subplots(3, 1, figsize=(7, 9), layout="constrained")
seen = torch.where(held_out, torch.nan, counts / hectares)
plots.intensity(forest.edges, forest.place(seen), label="observed trees per hectare", ax=axes[0])
plots.intensity(forest.edges, forest.place(found.mean), label="expected trees per hectare", ax=axes[1])
threshold = 2 * float(counts.sum() / hectares.sum())
chance = f"P(more than {threshold:.0f} per hectare)"
plots.intensity(forest.edges, forest.place(found.exceedance(threshold)), kind="exceedance", label=chance, ax=axes[2])
for ax in axes:
    ax.set(xlabel="metres", ylabel="metres")
plt.show()

# %% [markdown]
# The effect of the slope of the ground, with everything else equal, is a difference of two latent values, and its
# posterior is Gaussian:

# %%
here = inputs[:1].repeat(2, 1)
here[:, 2:] = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
with torch.no_grad():
    joint = models["both"](here)
step = torch.tensor([1.0, -1.0])
mean, sd = step @ joint.mean, (step @ joint.covariance_matrix @ step).sqrt()
ratio = (mean + sd * torch.tensor([0.0, -1.645, 1.645])).exp().tolist()
print("one standard deviation more of slope: {:.2f} times as many trees, 90 % from {:.2f} to {:.2f}".format(*ratio))

# %% [markdown]
# Are the predictions of the held-out cells calibrated? The number of trees in each block of cells against its predicted
# mean, with 90 % intervals from joint draws of the intensity and of the counts.

# %%
future = intensity(models["both"], forest, inputs)
draws = future.draws(1000, generator=generator)
figure, ax = plt.subplots(figsize=(5, 4), layout="constrained")
covered = 0
for b in chosen.tolist():
    members = (block == b).to(draws)
    drawn = torch.poisson(draws @ (members * hectares), generator=generator)
    low, high = torch.quantile(drawn, torch.tensor([0.05, 0.95])).tolist()
    truth, mean = float(counts @ members), float(drawn.mean())
    covered += low <= truth <= high
    ax.plot([truth, truth], [low, high], color=plots.BLUE, linewidth=1.5)
    ax.plot(truth, mean, "o", color=plots.BLUE, markersize=4)
limit = ax.get_xlim()[1]
ax.plot([0, limit], [0, limit], color=plots.GREY, linewidth=1, linestyle="--")
ax.set(xlabel="trees in a held-out block", ylabel="predicted, with 90 % intervals")
plt.show()
print(f"{covered} of {len(chosen)} blocks are in their intervals")
