r"""Priors that keep the hyperparameters of small data sets honest, registered on a model in one line.

A lengthscale of each of d columns is a parameter each, and a few hundred data determine few of them: without a prior
the evidence rewards some extreme values. In d columns of unit variance the distance of two inputs grows with sqrt(d),
and so does the lengthscale at which a function of all of them is as smooth as before:

    log l_j ~ N(sqrt(2) + log(d) / 2, s^2)                                    [Hvarfner et al. 2024, Sec. 4]

There s^2 = 3. The default here is s = 1, which has the better mean held-out log density in docs/evidence/priors.md: on
ten data sets, and on twenty others for classification, though not for regression.

Hvarfner, Hellsten & Nardi (2024), "Vanilla Bayesian optimization performs great in high dimensions", ICML.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpytorch import Module as GPyTorchModule
from gpytorch.kernels import PeriodicKernel, ScaleKernel
from gpytorch.models import ExactGP
from gpytorch.priors import LogNormalPrior, Prior
from gpytorch.variational import _VariationalStrategy
from torch import Tensor
from torch.nn import Module

from gpext.checks import whole_number
from gpext.kernels.columns import stationary_kernels
from gpext.models import LatentGP

__all__ = ["lengthscale_prior", "noise_prior", "outputscale_prior", "register_priors"]


def lengthscale_prior(num_columns: int, scale: float = 1.0) -> LogNormalPrior:
    """Return LogNormal(sqrt(2) + log(d) / 2, s), for each lengthscale of a kernel of d standardised columns.

    Its median is 4.1 sqrt(d). With s = sqrt(3) it is that of Hvarfner et al. (2024, Sec. 4), BoTorch's default since
    0.12.

    Args:
        num_columns: d, at least 1.
        scale: s, positive.

    Raises:
        TypeError, ValueError: d is not a positive whole number, or s not positive and finite.

    Example:
        >>> lengthscale_prior(4).base_dist.loc.item() - lengthscale_prior(1).base_dist.loc.item()  # log(2)
        0.69314...
    """
    num_columns = whole_number("num_columns", num_columns, 1)
    _check_positive("scale", scale)
    return LogNormalPrior(math.sqrt(2) + 0.5 * math.log(num_columns), scale)


def outputscale_prior() -> LogNormalPrior:
    """Return LogNormal(0, 1), for the variance of f: of targets of unit variance, or of logits; its median is 1.

    Example:
        >>> import torch
        >>> float(outputscale_prior().icdf(torch.tensor(0.5)))
        1.0
    """
    return LogNormalPrior(0.0, 1.0)


def noise_prior(target_scale: float = 1.0) -> LogNormalPrior:
    """Return LogNormal(-2 + 2 log s, 2), for the variance of noise on targets of standard deviation s.

    For standardised targets, s = 1, nine tenths of it lie between 0.005 and 3.6. BoTorch's, LogNormal(-4, 1), expects
    less noise than most data have that are no simulations (docs/evidence/priors.md).

    Args:
        target_scale: s, positive.

    Raises:
        ValueError: s is not positive and finite.

    Example:
        >>> noise_prior(10.0).base_dist.loc.item()  # -2 + 2 log 10
        2.6051...
    """
    _check_positive("target_scale", target_scale)
    return LogNormalPrior(-2.0 + 2 * math.log(target_scale), 2.0)


@torch.no_grad()
def register_priors(
    module: Module,
    *,
    num_inputs: int | None = None,
    lengthscale: Callable[[int], Prior] | None = lengthscale_prior,
    outputscale: Callable[[], Prior] | None = outputscale_prior,
    noise: Callable[[], Prior] | None = None,
    initialise: bool = False,
) -> dict[str, Prior]:
    """Register priors on the lengthscales, outputscales and noise of a model or an objective, and return them by name.

    Every objective of gpytorch and gpext then adds their log densities, divided by N, and samplers take them into
    account. They are made for standardised inputs and, if there is noise, targets. A parameter that has a prior of the
    usual name already, or is not trained, is left alone; so is the lengthscale of a PeriodicKernel, which is counted in
    periods. Each lengthscale takes the number of columns of its own kernel, `active_dims` if it has them.

    Args:
        module: an objective, for the priors of model and likelihood; a model, or one of its kernels.
        num_inputs: d of the inputs; by default that of the training inputs or the inducing points.
        lengthscale: number of columns of a kernel -> prior of each of its lengthscales; None for none.
        outputscale: () -> prior of the outputscale of a ScaleKernel; None for none.
        noise: () -> prior of the noise of Gaussian, Student-t, Laplace and Matern-3/2 likelihoods (a squared scale of
            their errors), such as :func:`noise_prior`; None, the default, for none: data determine it well.
        initialise: set parameters that have gpytorch's default to the mode of their prior.

    Raises:
        TypeError: not a module, or num_inputs is not a whole number.
        ValueError: num_inputs is not known, or not positive.

    Example:
        >>> import gpytorch
        >>> kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(ard_num_dims=3))
        >>> sorted(register_priors(kernel, num_inputs=3))
        ['base_kernel.lengthscale_prior', 'outputscale_prior']
    """
    if not isinstance(module, Module):
        raise TypeError(f"expected an objective, a model or a kernel; got {type(module).__qualname__}.")
    num_inputs = _num_inputs(module) if num_inputs is None else whole_number("num_inputs", num_inputs, 1)
    found: dict[str, Prior] = {}

    def register(name: str, owner: Module, leaf: str, make: Callable[[], Prior]) -> None:
        assert isinstance(owner, GPyTorchModule)
        raw, known = getattr(owner, f"raw_{leaf}"), {key for key, *_ in owner.named_priors()}
        if not raw.requires_grad or f"{leaf}_prior" in known:
            return
        prior = make().to(raw)
        owner.register_prior(f"{leaf}_prior", prior, _READ[leaf], _WRITE[leaf])
        if initialise and bool((raw == 0).all()):
            _WRITE[leaf](owner, prior.mode)
        found[f"{name}.{leaf}_prior".lstrip(".")] = prior

    if lengthscale is not None:
        for name, kernel, columns in stationary_kernels(module, num_inputs):
            if not isinstance(kernel, PeriodicKernel):
                register(name, kernel, "lengthscale", partial(lengthscale, len(columns)))
    for name, part in module.named_modules():
        if outputscale is not None and isinstance(part, ScaleKernel):
            register(name, part, "outputscale", outputscale)
        if noise is not None and "raw_noise" in part._parameters:
            register(name, part, "noise", noise)
    return found


# ---- functions that can be pickled with a model ---------------------------------------------------------------------


def _lengthscale(module: Any) -> Tensor:
    return module.lengthscale


def _outputscale(module: Any) -> Tensor:
    return module.outputscale


def _noise(module: Any) -> Tensor:
    return module.noise


def _set_lengthscale(module: GPyTorchModule, value: Tensor) -> None:
    module.initialize(lengthscale=value)


def _set_outputscale(module: GPyTorchModule, value: Tensor) -> None:
    module.initialize(outputscale=value)


def _set_noise(module: GPyTorchModule, value: Tensor) -> None:
    module.initialize(noise=value)


_READ = {"lengthscale": _lengthscale, "outputscale": _outputscale, "noise": _noise}
_WRITE = {"lengthscale": _set_lengthscale, "outputscale": _set_outputscale, "noise": _set_noise}


def _num_inputs(module: Module) -> int:
    """Return the number of columns of a model's training inputs or inducing points."""
    for part in module.modules():
        if isinstance(part, ExactGP | LatentGP) and part.train_inputs is not None:
            return part.train_inputs[0].size(-1)
        if isinstance(part, _VariationalStrategy):
            return part.inducing_points.size(-1)
    raise ValueError("the number of inputs is not known from a module without training inputs: give num_inputs.")


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite; got {value}.")
