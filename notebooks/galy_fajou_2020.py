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
# # Conjugacy from a single function
#
# Galy-Fajou, Wenzel and Opper, *Automated Augmented Conjugate Inference for Non-conjugate Gaussian Process Models*,
# AISTATS 2020 [GWO20].
#
# Inference with a non-Gaussian likelihood becomes easy if the likelihood is a scale mixture of Gaussians: give each
# datum an auxiliary precision $\omega_i$, and given all of these the model is Gaussian. The trick is old for the
# Student-t and famous for the logistic. The paper's point is that it needs no cleverness: all of it follows from one
# function of one variable,
#
# $$ p(y \mid f) = C\, e^{g(y) f}\, \varphi\big(h(f, y)^2\big), \qquad h^2 = \alpha(y) - \beta(y) f + \gamma(y) f^2 . $$
#
# If $\varphi$ is completely monotone with $\varphi(0) = 1$, it is the Laplace transform of a probability density
# $p(\omega)$ (Bernstein), and $p(y \mid f) = \int C e^{g f - h^2 \omega}\, p(\omega)\, d\omega$: Gaussian in $f$. We
# check the claims one by one. Nothing below needs more than a minute.

# %%
import os

import gpytorch
import matplotlib.pyplot as plt
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from scipy import stats
from torch import Tensor

import gpext
from gpext import plots
from gpext.inference import CAVI
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    LaplaceLikelihood,
    Matern32Likelihood,
    StudentTLikelihood,
    SuperGaussianLikelihood,
)
from gpext.mlls import AugmentedELBO
from gpext.posteriors import condition_dense
from gpext.variational import SiteVariationalStrategy

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # the matrices are small
SMOKE = "GPEXT_SMOKE" in os.environ  # sizes for continuous integration

# %% [markdown]
# ## 1. From $\varphi$ alone to a likelihood
#
# Take $\varphi(r) = e^{1 - \sqrt{1 + r}}$, a smooth relative of the Laplace density: round at the top, exponential in
# the tails. (With $h = y - f$ it is the hyperbolic distribution; we shall not use this fact.)


# %%
def phi(r: Tensor) -> Tensor:
    return torch.exp(1 - torch.sqrt(1 + r))


hyperbolic = SuperGaussianLikelihood(phi=phi)
noise = hyperbolic(torch.tensor(0.0))  # p(y | f = 0), a torch distribution, normalised numerically
y = torch.linspace(-12, 12, 4801)
density = noise.log_prob(y).exp()
print(f"total mass {torch.trapezoid(density, y):.6f}, standard deviation {noise.variance.sqrt():.4f}")

# %% [markdown]
# Not every function works. A Gaussian-shaped bump with a flat top, say, is not a mixture of Gaussians, and gpext's
# error states at which derivative it fails:

# %%
try:
    SuperGaussianLikelihood(phi=lambda r: torch.exp(-(r**2)))
except ValueError as error:
    print(error)

# %% [markdown]
# ## 2. $E[\omega]$ by automatic differentiation
#
# The density of $\omega$ given $c = |h|$ is a tilted $p(\omega)$, and may be ugly. Inference needs only its mean, which
# is a derivative: $E[\omega \mid c] = -\varphi'(c^2) / \varphi(c^2)$. For the known likelihoods this must reproduce the
# results derived by hand; for ours, $1 / (2\sqrt{1 + c^2})$.

# %%
c = torch.linspace(0.05, 5, 100)
target = torch.zeros(())
student_t = StudentTLikelihood()
student_t.noise, student_t.deg_free = 1.0, 4.0
laplace, matern, logit = LaplaceLikelihood(), Matern32Likelihood(), BernoulliLogitLikelihood()
laplace.noise = matern.noise = 1.0

by_hand = {
    "Student-t, 4 degrees of freedom": (student_t, (4 + 1) / 2 / (4 + c**2)),  # Gamma((nu + 1)/2, nu + c^2)
    "Laplace": (laplace, 1 / (2 * c)),  # inverse Gaussian
    "logistic": (logit, torch.tanh(c) / (2 * c)),  # twice a Polya-Gamma(1, 2c)
    "Matern-3/2": (matern, 1.5 / (1 + np.sqrt(3) * c)),  # generalised inverse Gaussian
    "from phi alone": (hyperbolic, 0.5 / torch.sqrt(1 + c**2)),
}
figure, ax = plt.subplots(figsize=(6, 3.8), layout="constrained")
for (name, (likelihood, known)), color in zip(by_hand.items(), plots.COLORS, strict=False):
    w = likelihood.augmentation(target).radial.mean(c**2).detach()
    print(f"{name:32s} largest relative deviation {((w - known) / known).abs().max():.1e}")
    ax.plot(c, w, color=color, label=name)
ax.set(xlabel="distance c", ylabel="E[w | c], the weight of a datum", ylim=(0, 1.6))
ax.legend(fontsize=9)
plt.show()

# %% [markdown]
# Read the curves as weights of a weighted least-squares problem: this is iteratively reweighted least squares with a
# posterior attached. All weights fall with the distance, which is what makes the noise models robust.
#
# ## 3. Coordinate ascent in closed form
#
# Alternate $q(\omega)$ and $q(f)$ (Algorithm 1). Each half step is exact, so the bound cannot fall, there is no step
# size, and nothing diverges.

# %%
generator = torch.Generator().manual_seed(3)
n = 40 if SMOKE else 120
x = torch.rand(n, generator=generator).sort().values * 10
clean = torch.sin(x) + 0.3 * x
y = clean + 0.2 * torch.randn(n, generator=generator)
bad = torch.randperm(n, generator=generator)[: n // 8]
y[bad] += 2 + 4 * torch.rand(len(bad), generator=generator)  # one-sided: no averaging out


def kernel(a: Tensor, b: Tensor, lengthscale: float = 1.5, variance: float = 4.0) -> Tensor:
    return variance * torch.exp(-0.5 * ((a[:, None] - b) / lengthscale) ** 2)


prior = MultivariateNormal(torch.zeros(n), to_linear_operator(kernel(x, x)))
for likelihood in (student_t, laplace, matern):
    likelihood.noise = 0.04
result = CAVI().infer(prior, student_t, y)
print(result.message)
smallest = (result.trace.diff() / result.trace[-1].abs()).min()
print(f"bound on log p(y): {result.log_evidence.item():.4f}; smallest relative increase in a step {smallest:.1e}")

# %% [markdown]
# The smallest increase is zero to rounding: the bound rises until it is stationary.
#
# ## 4. Robust regression
#
# One datum in eight is corrupted, always upwards. A model with Gaussian noise (its variance chosen by maximum
# likelihood) has to fit these data; the Student-t gives them a small weight. We flag data whose weight is less than a
# tenth of the largest possible one.

# %%
grid = torch.linspace(-0.3, 10.3, 300)
augmentation = student_t.augmentation(y)
weight = result.sites.precision * student_t.noise / (2 * augmentation.radial.mean(torch.zeros(())))
flagged = weight.detach() < 0.1

posterior = condition_dense(prior.mean, kernel(x, x), result.sites.detach())
latent = posterior.predict(torch.zeros_like(grid), kernel(x, grid), kernel(grid, grid))
predictive = student_t.marginal(latent)
lower, center, upper = (predictive.quantile(torch.tensor(p)).detach() for p in (0.025, 0.5, 0.975))

variances = torch.logspace(-2, 1, 61)
evidence = [
    torch.distributions.MultivariateNormal(torch.zeros(n), kernel(x, x) + v * torch.eye(n)).log_prob(y)
    for v in variances
]
v = variances[torch.stack(evidence).argmax()]
weights = torch.linalg.solve(kernel(x, x) + v * torch.eye(n), kernel(x, grid))
mean = weights.T @ y
half = 1.96 * (kernel(grid, grid).diagonal() - (weights * kernel(x, grid)).sum(0) + v).sqrt()

figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
plots.observations(x, y, ax=axes[0])
plots.predictive_band(grid, mean, mean - half, mean + half, ax=axes[0], color=plots.ORANGE, label="predictive mean")
axes[0].set_title("Gaussian noise")
plots.observations(x, y, outliers=flagged, ax=axes[1])
plots.predictive_band(grid, center, lower, upper, ax=axes[1])
axes[1].set_title("Student-t noise, coordinate ascent")
for ax in axes:
    ax.plot(grid, torch.sin(grid) + 0.3 * grid, color="black", linestyle="--", linewidth=1, label="truth")
    ax.set_xlabel("x")
    ax.legend(loc="upper left", fontsize=9)
axes[0].set_ylabel("y")
axes[0].set_ylim(-2, 13)
plt.show()
truth = torch.sin(grid) + 0.3 * grid
print(f"root mean squared error of the curve: Gaussian {(mean - truth).square().mean().sqrt():.3f}, ", end="")
print(f"Student-t {(center - truth).square().mean().sqrt():.3f}")
spoilt = torch.zeros(n, dtype=torch.bool)
spoilt[bad] = True
print(f"flagged: {(flagged & spoilt).sum()} of {spoilt.sum()} spoilt, {(flagged & ~spoilt).sum()} of the others")

# %% [markdown]
# ## 5. The price: the augmentation gap
#
# Keeping $q(\omega)$ and $q(f)$ independent loosens the bound. For the same $q(f)$ the loss is known in closed form up
# to one-dimensional integrals (Appendix A.4.3):
#
# $$ \Delta = \sum_i \big( E_q[\log \varphi(h_i^2)] - \log \varphi(E_q[h_i^2]) \big) \ge 0, $$
#
# because $\log \varphi$ is convex. The exact expectation is one call away:

# %%
for name, likelihood in {"Student-t": student_t, "Laplace": laplace, "Matern-3/2": matern}.items():
    q = CAVI().infer(prior, likelihood, y).posterior
    gap = likelihood.expected_log_prob(y, q) - likelihood.augmented_bound(y, q)
    print(f"{name:12s} gap per datum: smallest {gap.min():.4f}, mean {gap.mean():.4f}, largest {gap.max():.4f} nats")

# %% [markdown]
# The gap depends on how uncertain $f_i$ is compared with the noise. Along a one-dimensional cut, for a datum at zero
# and $q(f) = N(m, v)$ with Laplace noise of unit scale:

# %%
laplace.noise = 1.0
m = torch.linspace(-4, 4, 201)
figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
for v, color in zip((0.1, 0.5, 2.0), plots.COLORS, strict=False):
    q = MultivariateNormal(m, torch.diag_embed(torch.full_like(m, v)))
    zero = torch.zeros_like(m)
    gap = (laplace.expected_log_prob(zero, q) - laplace.augmented_bound(zero, q)).detach()
    ax.plot(m, gap, color=color, label=f"v = {v:g}")
ax.set(xlabel="posterior mean minus observation", ylabel="gap (nats)", ylim=(0, 0.45))
ax.legend(fontsize=9, ncols=3, loc="upper center")
plt.show()
laplace.noise = 0.04

# %% [markdown]
# It grows with the posterior variance, is widest somewhat more than a posterior standard deviation from the observation
# and falls off beyond. `benchmarks/augmentation_gap.py` repeats the paper's Figure 2 on its data sets.
#
# ## 6. A new likelihood from a kernel
#
# Any positive definite radial function is a $\varphi$, so every stationary kernel that is valid in all dimensions is
# also a noise density. The paper's example is the Matern-3/2. Defined by the kernel's formula alone, as a user would
# write it, it must agree with gpext's own class, whose moments are derived by hand.

# %%
rho = 0.2


def log_matern(r: Tensor) -> Tensor:
    t = torch.sqrt(3 * r) / rho
    return torch.log1p(t) - t


homemade = SuperGaussianLikelihood(log_phi=log_matern)
matern.noise = rho**2
ours, shipped = (CAVI().infer(prior, likelihood, y) for likelihood in (homemade, matern))
difference = (ours.posterior.mean - shipped.posterior.mean).abs().max()
print(f"bounds {ours.log_evidence.item():.8f} and {shipped.log_evidence.item():.8f}; means differ by {difference:.1e}")
exact = stats.gamma(2).sf(np.sqrt(3) * 1.5 / rho) / 2 + stats.gamma(1).sf(np.sqrt(3) * 1.5 / rho) / 2
tail = 2 * (1 - homemade(torch.tensor(0.0)).cdf(torch.tensor(1.5)))
print(f"P(|noise| > 1.5): numerically normalised {tail.item():.6e}, exact {exact:.6e}")

# %% [markdown]
# ## 7. Sparse and stochastic: the closed form is a natural gradient
#
# With inducing points the same update, on a minibatch and damped by $\rho$, is stochastic variational inference
# (Algorithm 3). It is also exactly gpytorch's natural gradient descent with `lr` $= \rho$ on the augmented bound. We
# take five steps of each from the same start.


# %%
class SVGP(gpytorch.models.ApproximateGP):
    def __init__(self, inducing_points: Tensor) -> None:
        super().__init__(SiteVariationalStrategy(self, inducing_points, learn_inducing_locations=False))
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


inducing_points = torch.linspace(0, 10, 15)[:, None]
by_formula, by_gradient = SVGP(inducing_points), SVGP(inducing_points)
mll = AugmentedELBO(student_t, by_gradient, num_data=n)
descent = gpytorch.optim.NGD(by_gradient.variational_parameters(), num_data=n, lr=0.3)
for step in range(5):
    batch = torch.randperm(n, generator=generator)[: n // 2]
    by_formula.variational_strategy.update(x[batch, None], y[batch], student_t, rate=0.3, num_data=n)
    by_gradient.train()
    descent.zero_grad()
    (-mll(by_gradient(x[batch, None]), y[batch])).backward()
    descent.step()
    by_formula.eval(), by_gradient.eval()
    with torch.no_grad():
        difference = (by_formula(x[:, None]).mean - by_gradient(x[:, None]).mean).abs().max()
    print(f"step {step + 1}: the two posterior means differ by {difference:.1e}")

# %% [markdown]
# Because $q(u)$ has a closed form for any kernel parameters, `gpext.fit` can also eliminate it and hand a deterministic
# bound to L-BFGS. One call, no step size:

# %%
model = SVGP(inducing_points)
robust = StudentTLikelihood()
outcome = gpext.fit(AugmentedELBO(robust, model, num_data=n), x[:, None], y, progress=False)
print(outcome.message)
print(
    f"lengthscale {model.covar_module.base_kernel.lengthscale.item():.3f}, noise scale "
    f"{robust.noise.sqrt().item():.3f} (0.2 in truth), degrees of freedom {robust.deg_free.item():.2f}"
)

# %% [markdown]
# ## 8. Classification
#
# The logistic is $\varphi(r) = 1 / \cosh\sqrt r$ with $h = f / 2$ and $g = y - 1/2$: the same code yields the
# Polya-Gamma augmentation without naming it. Two interleaved half circles:

# %%
from sklearn.datasets import make_moons

features, labels = (torch.from_numpy(a) for a in make_moons(100 if SMOKE else 300, noise=0.25, random_state=0))
labels = labels.double()
centers = features[torch.randperm(len(features), generator=generator)[:25]]
classifier = SVGP(centers)
bernoulli = BernoulliLogitLikelihood()
outcome = gpext.fit(AugmentedELBO(bernoulli, classifier, num_data=len(labels)), features, labels, progress=False)
print(outcome.message)

side = torch.linspace(-1.8, 2.8, 40 if SMOKE else 80)
plane = torch.cartesian_prod(side, side - 0.3)
with torch.no_grad():
    probability = bernoulli(classifier(plane)).probs.view(len(side), -1)
    fitted = bernoulli(classifier(features)).probs
figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
shades = axes[0].contourf(side, side - 0.3, probability.T, levels=np.linspace(0, 1, 11), cmap="RdBu_r", alpha=0.8)
axes[0].contour(side, side - 0.3, probability.T, levels=[0.5], colors="black", linewidths=1)
for value, marker, color in ((0, "o", plots.BLUE), (1, "s", plots.RED)):
    chosen = labels == value
    axes[0].plot(*features[chosen].T, marker, color=color, markersize=4, mec="white", mew=0.5, label=f"class {value}")
axes[0].set(xlabel="first feature", ylabel="second feature", title="probability of class 1")
axes[0].legend(loc="upper right", fontsize=9)
figure.colorbar(shades, ax=axes[0])
plots.reliability(labels, fitted, num_bins=6, ax=axes[1], label="training data")
axes[1].set_title("reliability")
axes[1].legend(loc="upper left", fontsize=9)
plt.show()

# %% [markdown]
# ## 9. The exact posterior: Gibbs sampling
#
# The same augmentation gives a sampler of the exact posterior. Both conditionals are known: $\omega_i$ has the tilted
# density $\pi(\omega \mid c) \propto e^{-c^2 \omega}\, p(\omega)$ at $c = |h(f_i)|$: a Polya-Gamma, gamma, inverse
# Gaussian or generalised inverse Gaussian variable for the likelihoods of the paper, and $f$ given $\omega$ is
# Gaussian. For a user-defined $\varphi$, $\omega$ is drawn by inverting its Laplace transform
# $\varphi(s + c^2) / \varphi(c^2)$ numerically. Here are both methods for the logistic, whose $\omega$ is twice a
# Polya-Gamma variable:

# %%
from gpext.distributions import PolyaGamma, ScaleMixture


def sech(r: Tensor) -> Tensor:
    return 1 / torch.cosh(r.sqrt())


tilts = torch.tensor([0.0, 1.0, 5.0])
w_grid = torch.linspace(0.01, 1.6, 200)
figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
for tilt, color in zip(tilts, (plots.BLUE, plots.RED, plots.GREY), strict=True):
    by_inversion = ScaleMixture(sech, tilt).log_prob(w_grid).exp()
    by_series = 2 * PolyaGamma(torch.tensor(1.0), 2 * tilt).log_prob(w_grid / 2).exp() / 4
    print(f"c = {tilt:g}: the two densities differ by at most {(by_inversion - by_series).abs().max():.1e}")
    drawn = 2 * PolyaGamma(torch.tensor(1.0), 2 * tilt).sample((20_000,), generator=generator)
    axis.hist(drawn, bins=60, range=(0, 1.6), density=True, histtype="step", color=color, linewidth=1)
    axis.plot(w_grid, by_inversion, color=color, label=f"c = {tilt:g}")
axis.set(xlabel="w", ylabel="density", title="Polya-Gamma draws, and their density from phi alone")
axis.legend()
plt.show()

# %% [markdown]
# The sampler takes a prior, a likelihood and targets, as the rules do. On the data of section 4 it shows how good the
# variational posterior is. Split R-hat below 1.01 indicates that the chains agree.

# %%
from gpext.samplers import GibbsSampler

sampler = GibbsSampler(prior, student_t, y)
draws = sampler.run(200 if SMOKE else 2000, num_chains=4, warmup=100, generator=generator, progress=False)
print(draws.message)
result = CAVI().infer(prior, student_t, y)
mean, sd = draws.latent.mean((0, 1)), draws.latent.flatten(0, 1).std(0)
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
axes[0].plot(x, y, ".", color=plots.GREY, markersize=4, label="data")
axes[0].fill_between(x, mean - 2 * sd, mean + 2 * sd, color=plots.BLUE, alpha=0.25, label="Gibbs, 2 sd")
axes[0].plot(x, mean, color=plots.BLUE)
axes[0].plot(x, result.posterior.mean.detach(), "--", color=plots.RED, label="CAVI, mean")
axes[0].set(xlabel="x", ylabel="f", ylim=(-1.5, 5), title="posterior of f")
axes[0].legend(fontsize=9)
axes[1].plot(sd, result.posterior.variance.detach().sqrt(), ".", color=plots.BLUE)
limit = [0, 1.1 * float(sd.max())]
axes[1].plot(limit, limit, color=plots.GREY, linewidth=1)
axes[1].set(xlabel="sd of f, Gibbs", ylabel="sd of f, CAVI", title="how confident is CAVI?")
plt.show()
ratio = (result.posterior.variance.detach().sqrt() / sd).median()
print(f"CAVI's standard deviations are {ratio:.2f} times the exact ones (median)")

# %% [markdown]
# How fast does it mix? The plot shows the autocorrelation of $f$ along a chain for three likelihoods, with independent
# draws of $f$ given $\omega$ as in the paper and with over-relaxed ones, which step past the mean of $f$ given $\omega$
# and so alternate about it. Their negative autocorrelation makes averages more accurate.


# %%
def autocorrelation(latent: Tensor, lags: int) -> Tensor:  # (chains, draws, N) -> (lags + 1,)
    centred = latent - latent.mean(1, keepdim=True)
    size = latent.size(1)
    product = torch.stack([(centred[:, k:] * centred[:, : size - k]).mean(1) for k in range(lags + 1)])
    return (product / product[0]).mean((1, 2))


def pseudo_huber(r: Tensor) -> Tensor:
    return torch.exp(1 - torch.sqrt(1 + 25 * r))


figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
cases = {"Student-t": student_t, "Laplace": LaplaceLikelihood(), "phi alone": SuperGaussianLikelihood(pseudo_huber)}
cases["Laplace"].noise = 0.04
for (name, likelihood), color in zip(cases.items(), (plots.BLUE, plots.RED, plots.GREY), strict=True):
    for overrelaxation, style in ((0.0, ":"), (0.6, "-")):
        sampler = GibbsSampler(prior, likelihood, y, overrelaxation=overrelaxation)
        chains = sampler.run(100 if SMOKE else 1000, 4, 50, generator=generator, progress=False).latent
        along = autocorrelation(chains, 8)
        label = name if overrelaxation else None
        axis.plot(range(9), along, style, marker="o", markersize=4, color=color, label=label)
        print(f"{name}, over-relaxation {overrelaxation:g}: lag 1 {along[1]:+.2f}, lag 2 {along[2]:+.2f}")
axis.axhline(0, color=plots.GREY, linewidth=0.8)
axis.set(xlabel="lag", ylabel="autocorrelation of f", title="dotted: independent given w; solid: over-relaxed")
axis.legend()
plt.show()

# %% [markdown]
# Hyperparameters are sampled as well if the sampler is given a model whose parameters have priors: by slice sampling,
# with $f$ integrated out for the kernel's parameters and $\omega$ integrated out for those of the likelihood.
# Predictions average one Gaussian per draw, without further sampling. `draws.to_arviz()` passes everything to ArviZ.

# %%
from gpytorch.priors import GammaPrior, LogNormalPrior


class Robust(gpext.models.LatentGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: StudentTLikelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        kernel = gpytorch.kernels.RBFKernel(lengthscale_prior=GammaPrior(3.0, 2.0))
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, outputscale_prior=LogNormalPrior(0.0, 1.0))

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


unknown = StudentTLikelihood(noise_prior=LogNormalPrior(-3.0, 1.5))
full = GibbsSampler(Robust(x, y, unknown), jitter=1e-8)
draws = full.run(40 if SMOKE else 500, num_chains=2, warmup=20 if SMOKE else 100, generator=generator, progress=False)
print(draws.message)
figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), layout="constrained")
for axis, (name, values) in zip(axes, draws.hyperparameters.items(), strict=False):
    for chain, color in zip(values.reshape(2, -1), (plots.BLUE, plots.RED), strict=True):
        axis.plot(chain, color=color, linewidth=0.6)
    axis.set(xlabel="draw", title=name.removeprefix("covar_module.").replace("base_kernel.", ""))
x_new = torch.linspace(-1, 12, 150)
predicted = draws.predict(x_new)
low, middle, high = (predicted.icdf(q) for q in (0.05, 0.5, 0.95))
axes[3].plot(x, y, ".", color=plots.GREY, markersize=3)
axes[3].fill_between(x_new, low, high, color=plots.BLUE, alpha=0.25)
axes[3].plot(x_new, middle, color=plots.BLUE)
axes[3].set(xlabel="x", ylim=(-1.5, 5), title="f: median, 90 % interval")
plt.show()

# %% [markdown]
# ## What to take along
#
# * A likelihood is one completely monotone function; the rest is differentiation and one Cholesky factor a step.
# * The bound rises at every step, and no step size has to be chosen.
# * The same identity gives an exact sampler, which needs no tuning either.
# * The price of the bound is that it is looser. That matters for hyperparameters: `gpext.fit` takes their gradients
#   from the bound without augmentation, unless told `hyperparameters="augmented"`.
