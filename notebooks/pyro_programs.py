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
# # Gaussian processes inside Pyro programs
#
# A Gaussian process is often one part of a larger model: groups with separate offsets, an unknown noise scale, a
# calibration constant. Pyro writes such models as programs, and `gpext.ppl` gives them two statements,
#
# $$ \texttt{latent\_gp}: \quad v \sim N(0, I), \quad f = \mu + L v, \quad L L^\top = K,
#    \qquad\qquad \texttt{observe}: \quad \times\; p(y \mid f), $$
#
# with any likelihood of gpext or gpytorch. Below, one program is sampled in two ways, by NUTS and by Gibbs sampling
# within Pyro; then NUTS serves as the reference for three approximations; finally Pyro's SVI trains a sparse model. All
# numbers in the text come from the cells above them; times depend on the machine.

# %%
import os
import time
from functools import partial

import matplotlib.pyplot as plt
import pyro
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from gpytorch.mlls import VariationalELBO
from gpytorch.models.pyro import PyroGP
from gpytorch.optim import NGD
from gpytorch.priors import GammaPrior
from pyro import distributions as dist
from pyro.infer import NUTS, TraceMeanField_ELBO

from gpext import plots, ppl
from gpext.inference import CAVI, EP, KL
from gpext.likelihoods import StudentTLikelihood
from gpext.variational import SiteVariationalStrategy

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # the matrices are small
SMOKE = "GPEXT_SMOKE" in os.environ  # sizes for continuous integration
generator = torch.Generator().manual_seed(0)

# %% [markdown]
# ## 1. Four instruments, one signal
#
# Four instruments measure the same function of time. Each has an offset, and about one reading in ten is wrong by a
# large amount.

# %%
num_groups, num_data = 4, 24 if SMOKE else 48
x = 10 * torch.rand(num_data, generator=generator).sort().values
group = torch.randint(num_groups, (num_data,), generator=generator)
true_offset = 0.7 * torch.randn(num_groups, generator=generator)
true_offset = true_offset - true_offset.mean()
signal = x.sin() + 0.1 * x - 0.5
y = signal + true_offset[group] + 0.3 * torch.randn(num_data, generator=generator)
wrong = torch.rand(num_data, generator=generator) < 0.1
y = torch.where(wrong, y + 4 * torch.randn(num_data, generator=generator), y)

# %% [markdown]
# The program states this model. The offsets have zero mean, since the level of all instruments together is the
# signal's, and an unknown spread. The noise is Student-t with 4 degrees of freedom; its squared scale has a gpytorch
# prior, which `pyro_sample_from_prior` turns into a sample site.

# %%
kernel = RBFKernel()
kernel.lengthscale = 2.0
prior = MultivariateNormal(torch.zeros(num_data), kernel(x).detach())
likelihood = StudentTLikelihood(noise_prior=GammaPrior(2.0, 5.0)).requires_grad_(False)
likelihood.deg_free = 4.0


def program():
    spread = pyro.sample("spread", dist.LogNormal(-0.5, 0.7))
    raw = pyro.sample("raw", dist.Normal(torch.zeros(num_groups), 1.0).to_event(1))
    offset = pyro.deterministic("offset", spread * (raw - raw.mean()))
    noisy = likelihood.pyro_sample_from_prior()
    f = ppl.latent_gp("f", prior, jitter=1e-6)
    ppl.observe("y", noisy, f + offset[group], y)


# %% [markdown]
# ## 2. NUTS and Gibbs
#
# NUTS moves all sites at once. It works on the whitened values $v$, whose prior is $N(0, I)$ whatever the kernel. Every
# step of its trajectory is an evaluation of the program with its gradient.
#
# `GibbsKernel` uses the structure of the likelihood: the Student-t is a mixture of Gaussians over their precisions $w$.
# It draws $w$ given $f$, then all of $f$ given $w$ from a Gaussian, both exactly, and lets NUTS move the few other
# sites while $v$ is held fixed.

# %%
short = partial(NUTS, max_tree_depth=3)  # at most 7 steps: v moves next, and with it what the others may do
kernels = {"NUTS": NUTS(program), "Gibbs": ppl.GibbsKernel(program, "f", inner=short, generator=generator)}
draws, seconds = {}, {}
for name, sampler in kernels.items():
    start = time.process_time()
    draws[name] = ppl.sample_posterior(
        sampler,
        num_samples=20 if SMOKE else 150 if name == "NUTS" else 500,
        warmup=10 if SMOKE else 100,
        generator=generator,
    )
    seconds[name] = time.process_time() - start

print("effective samples per second of CPU time, warm-up included: the smallest of each site")
print(f"{'':14}" + "".join(f"{name:>10}" for name in draws))
for site in ("f", "offset", "spread", "noise_prior"):
    rates = [draws[name].effective_sample_size(site).min() / seconds[name] for name in draws]
    print(f"{site:14}" + "".join(f"{rate:10.2f}" for rate in rates))
print(f"{'CPU seconds':14}" + "".join(f"{seconds[name]:10.1f}" for name in draws))

# %% [markdown]
# In the run that this text was written with, Gibbs had about twice as many effective draws of $f$, of the offsets and
# of the noise scale per second as NUTS (16.6, 13.6 and 6.6 against 6.9, 7.8 and 3.4).
#
# The two must agree about the posterior. The differences of their means, in standard errors that allow for the
# correlation of the draws, should look like draws of N(0, 1):

# %%
for site in ("f", "offset", "spread", "noise_prior"):
    means = [d.samples[site].mean((0, 1)) for d in draws.values()]
    error = sum(d.standard_error(site).square() for d in draws.values()).sqrt()
    z = (means[0] - means[1]) / error
    print(f"{site:14} largest |z| of {z.numel():3d}: {z.abs().max():.2f}")

figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
order = range(num_groups)
for (name, d), color, shift in zip(draws.items(), plots.COLORS, (-0.1, 0.1), strict=False):
    offset = d.samples["offset"].flatten(0, 1)
    mean, sd = offset.mean(0), offset.std(0)
    axes[0].errorbar([i + shift for i in order], mean, 2 * sd, fmt="o", color=color, label=f"{name}, 2 sd", capsize=3)
    noise = d.samples["noise_prior"].flatten().sqrt()
    axes[1].hist(noise, bins=20, density=True, histtype="step", color=color, label=name)
axes[0].plot(order, true_offset, "k_", markersize=22, label="true")
axes[0].set(xlabel="instrument", ylabel="offset", xticks=list(order), title="offsets")
axes[1].axvline(0.3, color="k", lw=1, label="of the regular readings")
axes[1].set(xlabel="noise scale", ylabel="posterior density", title="noise")
for axis in axes:
    axis.legend(fontsize=9)
plt.show()

# %% [markdown]
# Next, the signal itself, with each reading moved by the posterior mean of its instrument's offset:

# %%
f = draws["Gibbs"].samples["f"].flatten(0, 1)
moved = y - draws["Gibbs"].samples["offset"].mean((0, 1))[group]
figure, axis = plt.subplots(figsize=(11, 4.2), layout="constrained")
low, middle, high = f.quantile(torch.tensor([0.05, 0.5, 0.95]), 0)
axis.fill_between(x, low, high, color=plots.COLORS[0], alpha=0.25, label="posterior of f, 90 %")
axis.plot(x, middle, color=plots.COLORS[0])
axis.plot(x, signal, "k--", lw=1, label="true signal")
for i in order:
    axis.plot(x[group == i], moved[group == i], "o", ms=4, color=plots.COLORS[i + 1], label=f"instrument {i}")
axis.set(xlabel="time", ylabel="reading less offset", title="One signal, four instruments")
axis.legend(fontsize=9, ncols=2)
plt.show()

# %% [markdown]
# ## 3. A reference for approximations
#
# `latent_model` is the program of one prior and one likelihood. NUTS samples it without any assumption on the shape of
# the posterior, so it can judge rules that do assume one. Here the offsets are known and the noise scale is fixed.

# %%
fixed = StudentTLikelihood().requires_grad_(False)
fixed.deg_free, fixed.noise = 4.0, 0.09
known = y - true_offset[group]
reference = ppl.sample_posterior(
    NUTS(ppl.latent_model(prior, fixed, known, jitter=1e-6)),
    num_samples=20 if SMOKE else 300,
    warmup=10 if SMOKE else 100,
    generator=generator,
)
truth = reference.samples["f"].flatten(0, 1)
figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
for (name, rule), color in zip({"KL": KL(), "EP": EP(), "CAVI": CAVI()}.items(), plots.COLORS, strict=False):
    posterior = rule.infer(prior, fixed, known).posterior
    error = posterior.mean - truth.mean(0)
    ratio = posterior.stddev / truth.std(0)
    axes[0].plot(x, error / truth.std(0), ".-", color=color, label=name)
    axes[1].plot(x, ratio, ".-", color=color, label=name)
    print(f"{name:5} error of the mean, in posterior sd: {(error / truth.std(0)).abs().max():.2f} at most; ", end="")
    print(f"sd over that of NUTS: {ratio.min():.2f} to {ratio.max():.2f}")
noise = (reference.standard_error("f") / truth.std(0)).max()
print(f"standard error of the reference's means: {noise:.2f} posterior sd at most")
axes[0].set(xlabel="time", ylabel="(mean - that of NUTS) / sd", title="posterior mean")
axes[1].set(xlabel="time", ylabel="sd / that of NUTS", title="posterior standard deviation")
axes[0].legend(fontsize=9)
plt.show()

# %% [markdown]
# ## 4. SVI through gpytorch's Pyro model
#
# gpytorch's `PyroGP` works with gpext's variational strategy and likelihoods. `TraceMeanField_ELBO` computes the
# divergence in closed form and estimates the rest by draws of $f$; gpytorch's own loop, with `VariationalELBO`,
# integrates each datum by quadrature. Both train q(u) by natural gradients, and kernel, mean and noise by Adam, with
# step sizes that decay to zero. The data are the readings less the true offsets.


# %%
class Sparse(PyroGP):
    def __init__(self, likelihood, inducing_points):
        strategy = SiteVariationalStrategy(self, inducing_points, learn_inducing_locations=False)
        super().__init__(strategy, likelihood, num_data=num_data)
        self.mean_module = ConstantMean()
        self.covar_module = ScaleKernel(RBFKernel())

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def by_gpytorch(model):
    return -VariationalELBO(model.likelihood, model, num_data)(model(x), known)


particles = TraceMeanField_ELBO(num_particles=64, vectorize_particles=True, max_plate_nesting=1)


def by_pyro(model):
    return particles.differentiable_loss(model.model, model.guide, x, known) / num_data


def train(loss_of, num_steps):
    torch.manual_seed(0)
    pyro.clear_param_store()
    model = Sparse(StudentTLikelihood(), torch.linspace(0, 10, 12).unsqueeze(-1))
    model.likelihood.noise = 0.1
    elbo = VariationalELBO(model.likelihood, model, num_data)
    optimizers = [
        NGD(model.variational_parameters(), num_data=num_data, lr=0.1),
        torch.optim.Adam(model.hyperparameters(), lr=0.05),
    ]
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.01, num_steps) for o in optimizers]
    trace = []
    for _ in range(num_steps):
        model.zero_grad()
        loss_of(model).backward()
        for moving in (*optimizers, *schedules):
            moving.step()
        with torch.no_grad():
            trace.append(elbo(model(x), known).item())
    return trace


num_steps = 20 if SMOKE else 600
traces = {"gpytorch's loop": train(by_gpytorch, num_steps), "SVI in Pyro": train(by_pyro, num_steps)}
for name, trace in traces.items():
    print(f"{name:16} ELBO per datum after {num_steps} steps: {trace[-1]:.5f}")
print(f"difference: {abs(traces['SVI in Pyro'][-1] - traces['gpytorch' + chr(39) + 's loop'][-1]):.1e}")

figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
for (name, trace), color, style in zip(traces.items(), plots.COLORS, ("-", "--"), strict=False):
    axis.plot(trace, style, color=color, label=name)
axis.set(xlabel="step", ylabel="ELBO per datum (nats), by quadrature", title="SVI against gpytorch's own loop")
axis.legend(fontsize=9)
plt.show()

# %% [markdown]
# ## What to take along
#
# * `latent_gp` and `observe` put a Gaussian process and any likelihood into a Pyro program; offsets, scales and
#   hyperparameters are sites like any others.
# * `sample_posterior(NUTS(program), ...)` is the reference. `GibbsKernel` takes the place of NUTS where the likelihoods
#   that depend on $f$ have an augmentation; it refuses the others by name.
# * Draws judge approximations: here the means of KL and EP are right to within the reference's own error, and their
#   standard deviations to 8 %, its error included; those of CAVI are too small by up to 19 %.
# * gpytorch's Pyro models work with gpext's strategy and likelihoods, and SVI ends where gpytorch's own loop does, to
#   1e-4 nats a datum.
