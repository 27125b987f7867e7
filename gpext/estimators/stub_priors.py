"""Temporary."""

import math

from gpytorch.kernels import ScaleKernel
from gpytorch.priors import LogNormalPrior


def add_priors(*modules):
    for m in modules:
        for k in m.modules():
            if isinstance(k, ScaleKernel) and not hasattr(k, "outputscale_prior"):
                k.register_prior("outputscale_prior", LogNormalPrior(0.0, 1.5).to(k.raw_outputscale), _go, _so)
            elif getattr(k, "has_lengthscale", False) and not hasattr(k, "lengthscale_prior"):
                d = k.ard_num_dims or 1
                k.register_prior(
                    "lengthscale_prior",
                    LogNormalPrior(math.sqrt(2) + 0.5 * math.log(d), math.sqrt(3)).to(k.raw_lengthscale),
                    _gl,
                    _sl,
                )


def _go(m):
    return m.outputscale


def _so(m, v):
    return m._set_outputscale(v)


def _gl(m):
    return m.lengthscale


def _sl(m, v):
    return m._set_lengthscale(v)
