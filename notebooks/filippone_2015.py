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
# # Hyperparameters with error bars, by linear solves alone
#
# Filippone and Engler, *Enabling scalable stochastic gradient-based inference for Gaussian processes by employing the
# Unbiased LInear System SolvEr (ULISSE)*, ICML 2015 [FE15].
#
# A Gaussian process is usually trained: one value of its hyperparameters $\theta$ is found and believed. The paper
# draws them from $p(\theta \mid y)$ instead. Langevin dynamics needs no likelihood, only its gradient,
#
# $$ g_i = -\tfrac12 \operatorname{tr} K^{-1} \partial_i K + \tfrac12\, y^\top K^{-1} (\partial_i K) K^{-1} y , $$
#
# and forgives gradients that are only right on average. So a few systems $K s = b$ are solved per step, and each solve
# is stopped at random such that its expectation is the solution; no matrix is stored or factorised. This notebook does
# so by changing five lines of a gpytorch script:
#
# 1. a lazy kernel in place of a stored one,
# 2. what solves cost: the condition number, and preconditioners,
# 3. unbiased gradients in place of exact ones,
# 4. Langevin steps in place of an optimiser's, as a plain torch loop and as a sampler with diagnostics,
# 5. predictions that average over $\theta$,
# 6. and beyond the paper: likelihoods that are not Gaussian.

# %%
import os
import time

import gpytorch
import matplotlib.pyplot as plt
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior
from sklearn.datasets import load_diabetes
from torch import Tensor

from gpext import plots
from gpext.kernels import keops
from gpext.likelihoods import StudentTLikelihood
from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.models import LatentGP
from gpext.optim import SGLD
from gpext.samplers import AugmentedSGLDSampler, MetropolisHastings, SGLDSampler
from gpext.solvers import LowRankPreconditioner, Ulisse, conjugate_gradients, partial_cholesky, unbiased_cg

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # the matrices are small
torch.manual_seed(0)
SMOKE = "GPEXT_SMOKE" in os.environ  # sizes for continuous integration


def seed(number=0):
    return torch.Generator().manual_seed(number)


# %% [markdown]
# ## 1. The model, with a lazy kernel
#
# The paper's model is $k(x, x') = \sigma \exp(-\tau |x - x'|^2) + \lambda \delta_{xx'}$. The data here are
# scikit-learn's diabetes set: ten measurements of 442 patients and the progress of the disease a year later. The kernel
# is the same as in gpytorch, except for the module it comes from: `keops.RBFKernel` computes products with $K$ without
# storing it. The paper does not state its priors; these are wide log-normal ones.

# %%
x, y = load_diabetes(return_X_y=True)
order = np.random.default_rng(0).permutation(len(y))
n = 80 if SMOKE else 300
data = torch.tensor((x - x.mean(0)) / x.std(0))[order], torch.tensor((y - y.mean()) / y.std())[order]
x, y, x_new, y_new = data[0][:n], data[1][:n], data[0][n : n + 100], data[1][n : n + 100]


class GP(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, kernel=keops.RBFKernel):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel())
        self.covar_module.register_prior("outputscale_prior", LogNormalPrior(0.0, 1.5), "outputscale")
        self.covar_module.base_kernel.register_prior("lengthscale_prior", LogNormalPrior(1.0, 1.0), "lengthscale")
        likelihood.register_prior("noise_prior", LogNormalPrior(-1.0, 1.0), "noise")
        self.covar_module.base_kernel.lengthscale = 3.0

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


model = GP(x, y)
K = model.covar_module(x).evaluate_kernel()
stock = GP(x, y, gpytorch.kernels.RBFKernel)
v = torch.randn(n, 1, generator=seed())
difference = (K @ v - stock.covar_module(x) @ v).abs().max()
print(f"a product with K differs from gpytorch's by {difference.item():.1e}")

# %% [markdown]
# ## 2. What a solve costs
#
# Conjugate gradients reach a given accuracy in some $\sqrt\kappa$ products, $\kappa$ the condition number, and
# $\kappa$ grows as the noise falls: the paper's Figures 2 and 3. A partial Cholesky factor with the noise, $L L^\top +
# \lambda I$, takes the large eigenvalues away.

# %%
dense = K.to_dense().detach()
eigenvalues = torch.linalg.eigvalsh(dense).clamp_min(0)
noises = torch.logspace(-5, 0, 5 if SMOKE else 11)
steps = {"plain": [], "preconditioned, rank 50": []}
for noise in noises.tolist():

    def matvec(v, noise=noise):
        return dense @ v + noise * v

    L = partial_cholesky(lambda index: dense[:, index], dense.diagonal(), rank=50, generator=seed())
    P = LowRankPreconditioner.of(L, torch.full((n,), noise))
    steps["plain"].append(conjugate_gradients(matvec, y, tolerance=1e-8).num_steps)
    found = conjugate_gradients(matvec, y.unsqueeze(-1), precondition=P, tolerance=1e-8)
    steps["preconditioned, rank 50"].append(found.num_steps)
kappa = (eigenvalues[-1] + noises) / (eigenvalues[0] + noises)
figure, ax = plt.subplots(figsize=(6.2, 4.2), layout="constrained")
for (name, counts), color in zip(steps.items(), (plots.ORANGE, plots.BLUE), strict=True):
    ax.loglog(kappa, counts, "o-", color=color, label=name)
ax.set(xlabel="condition number", ylabel="steps to a residual of 1e-8", title="conjugate gradients")
ax.legend()
plt.show()

# %% [markdown]
# **Solves that stop at random.** The solution is a sum of increments. Take the increments up to a coarse residual, then
# toss a coin before each further step: the increment after $j$ more steps is divided by the probability $P_j$ of
# getting that far. The mean is the solution for any $P_j$ fixed beforehand, but with some laws no practical number of
# draws shows it. Below is the error of means of many estimates against their number. gpext's law decays as fast as the
# remainder of the solution. The published one decays much faster, like $\exp(-j^2 / 2)$: it is just as unbiased on
# paper, but never reaches the tail.

# %%
noise = 1e-3


def matvec(v):
    return dense @ v + noise * v


exact = torch.linalg.solve(dense + noise * torch.eye(n), y)
number = 200 if SMOKE else 2000
stopped = conjugate_gradients(matvec, y, tolerance=0.1).solution
figure, ax = plt.subplots(figsize=(6.2, 4.2), layout="constrained")
ax.axhline(float((stopped - exact).norm() / exact.norm()), color=plots.GREY, ls="--", label="stopped for good")
for name, law, color in (("gpext's law", None, plots.BLUE), ("the published one", Ulisse(1.0), plots.ORANGE)):
    runs = [
        unbiased_cg(matvec, y.unsqueeze(-1), num_estimates=number // 10, tolerance=0.1, survival=law, generator=seed(k))
        for k in range(10)
    ]
    estimates = torch.cat([run.estimates for run in runs]).squeeze(-1)
    counts = torch.logspace(0, np.log10(number), 25).long()
    means = estimates.cumsum(0)[counts - 1] / counts.unsqueeze(-1)
    ax.loglog(counts, (means - exact).norm(dim=-1) / exact.norm(), color=color, label=f"{name}: {runs[0].survival}")
ax.set(xlabel="number of estimates", ylabel="relative error of their mean", title="solves that stop at random")
ax.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## 3. Unbiased gradients
#
# `UnbiasedMarginalLogLikelihood` takes the place of `ExactMarginalLogLikelihood`. Four vectors of random signs estimate
# the trace; for the quadratic term two independent truncations of one run are multiplied, since the square of an
# unbiased estimate is not an unbiased estimate of the square.

# %%
mll = UnbiasedMarginalLogLikelihood(model.likelihood, model, num_probes=4)


def gradient(mll) -> Tensor:
    mll.model.train().zero_grad()
    (n * mll(mll.model(x), y)).backward()
    return torch.stack([p.grad.squeeze() for p in mll.model.parameters()])


reference = gradient(ExactMarginalLogLikelihood(stock.likelihood, stock))
estimates = torch.stack([gradient(mll) for _ in range(10 if SMOKE else 60)])
error = estimates.std(0) / len(estimates) ** 0.5
for (name, _), r, m, s, e in zip(
    model.named_parameters(), reference, estimates.mean(0), estimates.std(0), error, strict=True
):
    print(f"{name:42s} exact {r:8.3f}   mean {m:8.3f} +- {e:.3f}   sd of one estimate {s:.3f}")

# %% [markdown]
# ## 4. Langevin steps
#
# $\theta \leftarrow \theta + \tfrac\epsilon2 M g + \mathcal N(0, \epsilon M)$. `SGLD` is a torch optimiser; the loop is
# an ordinary training loop, and its iterates are draws. It shows two things that the sampler below takes care of: the
# loss is the log posterior itself, *not* divided by the number of data, and the log Jacobian of gpytorch's constraints
# belongs to it (it is left out here, which makes the priors flat in another coordinate).

# %%
optimizer = SGLD(model.parameters(), lr=0.05, preconditioner=torch.tensor([0.05, 1.0, 0.5]), generator=seed())
trace = []
for _ in range(20 if SMOKE else 100):
    optimizer.zero_grad()
    loss = -n * mll(model.train()(x), y)
    loss.backward()
    optimizer.step()
    trace.append(model.covar_module.base_kernel.lengthscale.item())
print(f"length scale after {len(trace)} steps of the loop: {trace[-1]:.2f}")

# %% [markdown]
# `SGLDSampler(mll)` does the rest: it starts its chains near the mode of a subset, takes $M$ from the curvature there,
# adds Jacobians, estimates the noise of the gradients and subtracts it from the injected noise, and reports on
# convergence. The reference is a random walk with exact marginal likelihoods, `MetropolisHastings`.

# %%
chains, draws, warmup = (2, 30, 50) if SMOKE else (4, 500, 80)
begun = time.perf_counter()
langevin = SGLDSampler(UnbiasedMarginalLogLikelihood(model.likelihood, model, num_probes=4)).run(
    draws, chains, warmup, generator=seed(), progress=False
)
print(langevin.message)
exact_mll = ExactMarginalLogLikelihood(stock.likelihood, stock)
metropolis = MetropolisHastings(exact_mll).run(2 * draws, chains, 3 * warmup, generator=seed(), progress=False)
print(metropolis.message, f"\nboth together {time.perf_counter() - begun:.1f} s")

# %%
names = {
    "covar_module.outputscale": r"$\sigma$",
    "covar_module.base_kernel.lengthscale": "length scale",
    "likelihood.noise_covar.noise": r"noise $\lambda$",
}
figure, axes = plt.subplots(2, 3, figsize=(12.5, 6), layout="constrained")
for (name, label), (top, bottom) in zip(names.items(), axes.T, strict=True):
    of_walk, of_langevin = (found.draws[name].flatten(1).log() for found in (metropolis, langevin))
    bins = np.histogram_bin_edges(of_walk.flatten(), 30)
    top.hist(of_walk.flatten(), bins, density=True, color=plots.GREY, alpha=0.5, label="Metropolis-Hastings")
    top.hist(of_langevin.flatten(), bins, density=True, histtype="step", color=plots.BLUE, lw=2, label="SGLD")
    top.set(xlabel=f"log {label}", yticks=[])
    for chain, color in zip(of_langevin, plots.COLORS, strict=False):
        bottom.plot(chain, color=color, lw=0.6)
    running = of_langevin.cumsum(1) / torch.arange(1, draws + 1)
    bottom.plot(running.mean(0), color="black", lw=1.5, label="running mean")
    bottom.set(xlabel="draw", ylabel=f"log {label}")
    shift = (of_langevin.mean() - of_walk.mean()) / of_walk.std()
    print(f"log {label}: means differ by {shift:+.2f} sd, ratio of sds {of_langevin.std() / of_walk.std():.2f}")
axes[0, 0].legend(fontsize=8)
axes[1, 0].legend(fontsize=8)
plt.show()

# %% [markdown]
# Above, marginals of the logarithms; below, traces of the Langevin chains, which decorrelate within some tens of draws,
# more slowly where a chain has gone far out into the tail. With hundreds of draws the histograms and the differences
# printed above still have noticeable errors; ArviZ estimates them from `langevin.to_arviz()`, and
# `run(..., resume=langevin)` continues the chains. At this size the random walk is the better choice. At tens of
# thousands of data it cannot take a step, and Langevin dynamics remains feasible.
#
# ## 5. Predictions

# %%
predicted = langevin.predict(x_new, num_draws=20 if SMOKE else 60)
stock.initialize(**{name: value.flatten(0, 1).median(0).values for name, value in langevin.draws.items()})
with torch.no_grad():
    plugged_in = stock.likelihood(stock.eval()(x_new))
for name, log_prob in (
    ("averaged over the draws", predicted.log_prob(y_new)),
    ("at the median of the draws", torch.distributions.Normal(plugged_in.mean, plugged_in.stddev).log_prob(y_new)),
):
    print(f"mean log density of {len(y_new)} new patients, {name}: {log_prob.mean():.4f}")

# %% [markdown]
# With so many data for three parameters, averaging changes predictions little; it is the parameters themselves whose
# error bars matter here. With few data this changes: the last section has an example.
#
# ## 6. Beyond the paper: noise that is not Gaussian
#
# The paper leaves other likelihoods to the future. A Student-t is a Gaussian whose variance is itself random: given the
# scales w of all data, the model is a regression with a separate noise variance $1 / \tau_i$ for each datum, and
# Langevin steps apply as before. `AugmentedSGLDSampler` alternates them with draws of w and of the latent function, for
# every likelihood of gpext that has an augmentation; the scale of the noise is drawn as well.

# %%
rng = np.random.default_rng(1)
t = torch.tensor(np.sort(rng.uniform(0, 10, 40)))
z = torch.sin(t) + torch.tensor(0.15 * rng.standard_normal(40))
z[[6, 17, 30]] += torch.tensor([2.5, -2.0, 3.0])


class Robust(LatentGP):
    def __init__(self, x: Tensor, y: Tensor):
        likelihood = StudentTLikelihood()
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.covar_module.register_prior("outputscale_prior", LogNormalPrior(0.0, 1.0), "outputscale")
        self.covar_module.base_kernel.register_prior("lengthscale_prior", LogNormalPrior(0.0, 1.0), "lengthscale")
        likelihood.register_prior("noise_prior", LogNormalPrior(-2.0, 1.0), "noise")
        likelihood.initialize(noise=0.1, deg_free=3.0)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


robust = AugmentedSGLDSampler(Robust(t, z)).run(
    10 if SMOKE else 100, 2, 5 if SMOKE else 20, generator=seed(), progress=False
)
print(robust.message)
for name, value in robust.hyperparameters.items():
    middle, low, high = value.flatten().quantile(torch.tensor([0.5, 0.05, 0.95])).tolist()
    print(f"{name}: {middle:.3f}, 90 % in {low:.3f} .. {high:.3f}")

# %%
grid = torch.linspace(-2, 12, 40 if SMOKE else 120)
of_latent = robust.predict(grid, num_draws=10 if SMOKE else 100)
figure, axes = plt.subplots(1, 2, figsize=(12.5, 4.2), layout="constrained")
sd = of_latent.stddev
axes[0].fill_between(grid, of_latent.mean - 2 * sd, of_latent.mean + 2 * sd, color=plots.BLUE, alpha=0.2)
axes[0].plot(grid, of_latent.mean, color=plots.BLUE, label="mean and 2 sd of f, averaged over draws")
axes[0].plot(grid, torch.sin(grid), "k--", lw=1, label="truth")
plots.observations(t, z, ax=axes[0])
axes[0].set(xlabel="x", ylim=(-3.5, 6))
axes[0].legend(fontsize=8, loc="upper right")
scale, length = (
    robust.hyperparameters[name].flatten()
    for name in ("covar_module.outputscale", "covar_module.base_kernel.lengthscale")
)
axes[1].loglog(length, scale, ".", color=plots.BLUE)
axes[1].set(xlabel="length scale", ylabel="output scale", title="draws of the kernel's parameters")
plt.show()

# %% [markdown]
# Three outliers, one of them some twenty standard deviations of the noise away, do not move the curve. Beyond the data
# the band is wider than any single fit would make it: the length scale and the output scale are not known well, and
# they are tied to each other.
#
# ## What to take along
#
# * `keops` kernel, `UnbiasedMarginalLogLikelihood`, `SGLD`: three swaps turn a gpytorch script into draws.
# * A law of random truncation must fall no faster than the increments; a preconditioner makes both decay fast.
# * `SGLDSampler(...).run(...)` returns a `HyperPosterior`: `.draws`, `.to_arviz()`, `.predict(x)`, and the state from
#   which to resume the chains; with `checkpoint=` a run survives being killed.
# * For other likelihoods, `AugmentedSGLDSampler(model)`; where factorisations are cheap, also `GibbsSampler(model)`.
