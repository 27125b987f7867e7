r"""Nearest-neighbour posteriors beside those of the exact prior, and the cost of one evaluation.

The hyperparameters are those that the data were drawn with. Both posteriors are Gaussian, N(m, V) with the exact prior
and N(m~, V~) with neighbours:

    KL(N(m, V) || N(m~, V~)) = (tr(V~^-1 V) + (m~ - m)' V~^-1 (m~ - m) - n + log|V~| - log|V|) / 2
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, MaternKernel, PeriodicKernel
from torch import Tensor

from benchmarks.angle_methods import absolute_error
from benchmarks.datasets import load
from benchmarks.gpboost_families import RULES, Data, FieldModel, clocks
from benchmarks.ledger import Row
from benchmarks.neighbour_problems import FIELDS, Field, data_of_field
from gpext import fit
from gpext.inference import InferenceResult, Laplace, Rule
from gpext.likelihoods import VonMisesLikelihood
from gpext.linalg.neighbours import maximin_order
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.operators.neighbour_covariance import NeighbourGraph
from gpext.samplers import GibbsSampler
from gpext.variational import kmeans_inducing_points
from gpext.variational.neighbour_choice import NeighbourChoice


def true_model(field: Field, data: Data, rule: Rule, lengthscale: float, **options: Any) -> FieldModel:
    """Return a model with the hyperparameters that the data were drawn with, in train mode."""
    likelihood, y, _ = field.family.ours(data.y)
    likelihood.initialize(**field.parameters)
    model = FieldModel(torch.from_numpy(data.x), y, likelihood, rule, **options)
    model.mean_module.constant.data.fill_(field.mean)
    model.covar_module.outputscale = field.variance
    model.covar_module.base_kernel.lengthscale = lengthscale
    return model.train()


def _infer(model: FieldModel) -> tuple[InferenceResult, float]:
    """Return the inference, and the CPU seconds that its first evaluation takes."""
    started = clocks()[0]
    with torch.no_grad():
        result = model.result
    return result, clocks()[0] - started


def kl_divergence(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> float:
    """Return KL(N(mean, covariance) || N(other_mean, other_covariance)) of vectors (n,)."""
    chol, other = torch.linalg.cholesky(covariance), torch.linalg.cholesky(other_covariance)
    trace = torch.linalg.solve_triangular(other, chol, upper=False).square().sum()
    moved = torch.linalg.solve_triangular(other, (other_mean - mean).unsqueeze(-1), upper=False).square().sum()
    log_dets = 2 * (other.diagonal().log().sum() - chol.diagonal().log().sum())
    return (0.5 * (trace + moved - len(mean) + log_dets)).item()


def divergence(
    field: Field, data: Data, rule: Rule, lengthscale: float, ordering: str, fill_in: bool, numbers: Sequence[int]
) -> Row:
    """Return the divergence of the posteriors of each number of neighbours from that of the exact prior."""
    exact = _infer(true_model(field, data, rule, lengthscale))[0].posterior
    found = {}
    for k in numbers:
        options = {"neighbours": k, "ordering": ordering, "fill_in": fill_in}
        near = _infer(true_model(field, data, rule, lengthscale, **options))[0].posterior
        pair = (exact.mean, exact.covariance_matrix, near.mean, near.covariance_matrix)
        found[str(k)] = kl_divergence(*(part.detach() for part in pair))
    return {"divergence": found}


def kernels() -> dict[str, Kernel]:
    """Kernels of two places in the unit square and a time in [0, 10]."""
    places = MaternKernel(1.5, active_dims=(0, 1))
    season, trend = PeriodicKernel(active_dims=(2,)), MaternKernel(1.5, active_dims=(2,))
    places.lengthscale, trend.lengthscale, season.lengthscale, season.period_length = 0.3, 2.0, 0.5, 1.0
    return {
        "places x period": places * season,
        "places x period x time": places * season * trend,
        "places x time": places * trend,
        "places + time": places + trend,
    }


def prior_divergence(name: str, by: str, size: int, numbers: Sequence[int]) -> Row:
    """Return the divergence of the prior of each number of neighbours, by distance or correlation, from the exact one.

    Of a random `size` of places and times, with a nugget of 1e-6.
    """
    x = torch.rand(size, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 2] *= 10
    kernel = kernels()[name].double()
    zero, nugget = x.new_zeros(size), 1e-6 * torch.eye(size, dtype=torch.float64)
    found = {}
    for k in numbers:
        choice = NeighbourChoice(k, 3, region_size=None, by=by, num_data=size, fill_in=False)
        model = _Prior(kernel)
        with torch.no_grad():
            near = choice.prior(model, x, None, several=False).covariance_matrix
            exact = kernel(x).to_dense()
        found[str(k)] = kl_divergence(zero, exact + nugget, zero, near + nugget)
    return {"divergence": found}


class _Prior(torch.nn.Module):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(x.new_zeros(x.shape[:-1]), self.kernel(x))


def beside_dense(
    field: Field, data: Data, rule: Rule, lengthscale: float, priors: Sequence[tuple[int, int, str, bool]]
) -> Row:
    """Return the largest differences of means (in sd) and sds (relative), that of the evidence, and CPU seconds.

    `priors` are the number of neighbours and of inducing inputs, 0 for none, of each approximation, how neighbours are
    chosen, and whether they are filled in.
    """
    exact, seconds = _infer(true_model(field, data, rule, lengthscale))
    sd = exact.posterior.variance.sqrt()
    found = []
    for k, inducing, by, fill_in in priors:
        points = kmeans_inducing_points(torch.from_numpy(data.x), inducing) if inducing else None
        options = {"neighbours": k, "inducing_inputs": points, "neighbours_by": by, "fill_in": fill_in}
        near, of_neighbours = _infer(true_model(field, data, rule, lengthscale, **options))
        moved = (near.posterior.mean - exact.posterior.mean) / sd
        cell = {
            "neighbours": k,
            "inducing": inducing,
            "by": by,
            "filled": fill_in,
            "mean": moved.abs().max().item(),
            "rms": moved.square().mean().sqrt().item(),
            "sd": (near.posterior.variance.sqrt() / sd - 1).abs().max().item(),
            "evidence": (near.log_evidence - exact.log_evidence).item(),
            "seconds": of_neighbours,
            "status": near.status.name,
        }
        found.append(cell)
    return {"approximations": found, "seconds": seconds, "status": exact.status.name}


def beside_draws(field: Field, data: Data, num_draws: int, neighbours: int = 20, num_chains: int = 2) -> Row:
    """Return how far each rule is from draws of the exact posterior, all at hyperparameters trained under EP.

    Differences of means in sd of the draws, ratios of sds, log densities of test data and CPU seconds. Means over draws
    have errors of their own, whose size those over tenths of the chains tell.
    """
    likelihood, y, _ = field.family.ours(data.y)
    x, x_test, y_test = (torch.from_numpy(part) for part in (data.x, data.x_test, data.y_test))
    model = FieldModel(x, y, likelihood, RULES["EP"], neighbours=neighbours)
    fit(LatentMarginalLogLikelihood(likelihood, model), x, y, progress=False, initial="subset")
    started = clocks()[0]
    sampler = GibbsSampler(model.eval(), hyperparameters=())
    generator = torch.Generator().manual_seed(0)
    draws = sampler.run(num_draws, num_chains, num_draws // 10, generator=generator, progress=False)
    seconds = clocks()[0] - started
    latent = draws.latent
    mean, sd = latent.mean((0, 1)), latent.flatten(0, 1).std(0)
    parts = torch.stack([part.mean(1) for part in latent.chunk(10, 1)]).flatten(0, 1)  # means of tenths of chains
    found = {
        "Gibbs sampling": {
            "error": (parts.var(0) / sd.square()).mean().div(len(parts)).sqrt().item(),
            "log_density": draws.predict_targets(x_test).log_prob(y_test).mean().item(),
            "seconds": seconds,
            "status": draws.status.name,
        }
    }
    for name, rule in RULES.items():
        model.inference = rule
        result, seconds = _infer(model)
        with torch.no_grad():
            predicted = model.likelihood(model(x_test)).log_prob(y_test).mean().item()
        moved = (result.posterior.mean - mean) / sd
        found[name] = {
            "rms": moved.square().mean().sqrt().item(),
            "mean": moved.mean().item(),
            "sd": (result.posterior.variance.sqrt() / sd).mean().item(),
            "log_density": predicted,
            "seconds": seconds,
            "status": result.status.name,
        }
    return {"size": len(y), "draws": num_draws * num_chains, "posteriors": found}


def factor(size: int, columns: int, neighbours: int = 20) -> Row:
    """Return the cost of a Cholesky factor for `size` points of the unit cube, and CPU seconds to lay it out."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(size, columns, dtype=torch.float64, generator=generator)
    started = clocks()[0]
    graph = NeighbourGraph.of(points, neighbours, maximin_order(points, generator))
    return {
        "size": size,
        "columns": columns,
        "largest": max(len(front.own) + len(front.boundary) for front in graph.dissection.fronts),
        "work": graph.dissection.work,
        "stored": graph.dissection.stored,
        "seconds": clocks()[0] - started,
    }


def evaluation(field_name: str, size: int, lengthscale: float, **options: Any) -> Row:
    """Return CPU seconds of the objective under Laplace with its gradient, and memory, in a process of its own."""
    data = data_of_field(FIELDS[field_name], size, 0, lengthscale, 0)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_evaluation, field_name, data, lengthscale, options).result()


def _evaluation(field_name: str, data: Data, lengthscale: float, options: dict[str, Any]) -> Row:
    torch.set_num_threads(1)
    model = true_model(FIELDS[field_name], data, RULES["Laplace"], lengthscale, **options)
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    (x,), y = model.train_inputs, model.train_targets
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = [clocks()[0]]
    model(x)
    times.append(clocks()[0])
    for factor in (1.0, 1.02):
        model.covar_module.base_kernel.lengthscale = factor * lengthscale
        mll(model(x), y).backward()
        times.append(clocks()[0])
    seconds = dict(zip(("neighbours", "first", "again"), np.diff(times).tolist(), strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"size": len(y), **seconds, "megabytes": peak / 1024, "megabytes_before": before / 1024}


def wind(name: str, most: int, neighbours: int | None) -> Row:
    """Return scores and seconds of the directions of the wind in a tenth of the hours, learned from `most` others."""
    data = load(name, fold=(0, 10), max_train=most)
    x, x_test = data.train_x[:, :1].double(), data.test_x[:, :1].double()
    y, y_test = data.train_y.double(), data.test_y.double()
    started = clocks()[0]
    model = FieldModel(x, y, VonMisesLikelihood().double(), Laplace(), neighbours=neighbours)
    objective = LatentMarginalLogLikelihood(model.likelihood, model)
    result = fit(objective, x, y, progress=False, initial="subset")
    train = clocks()[0] - started
    started = clocks()[0]
    with torch.no_grad():
        predictive = model.likelihood(model.eval()(x_test))
        log_density = float(predictive.log_prob(y_test).mean())
    return {
        "size": len(x),
        "tests": len(x_test),
        "status": result.status.name,
        "train": train,
        "predict": clocks()[0] - started,
        "log_density": log_density,
        "error": float(absolute_error(predictive.mean, y_test).mean()),
    }
