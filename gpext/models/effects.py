r"""The posterior of one term of a sum of Gaussian processes: an additive effect with its band.

    f = mu + sum_k f_k,   f_k ~ N(0, K_k) independent:   cov(f_k(x*), f(X)) = K_k(x*, X)

so that the sites of f, whatever rule has found them, condition f_k as they do f [Duvenaud, Nickisch & Rasmussen 2011,
Sec. 2; Rasmussen & Williams 2006, Sec. 2.4.5]. The effects of one input are correlated a posteriori: their means add up
to that of f - mu, their variances do not.
"""

from __future__ import annotations

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from torch import Tensor

from gpext.checks import check_finite, check_tensor
from gpext.kernels import accurate
from gpext.models.latent_gp import LatentGP
from gpext.variational import check_columns, check_dtype


def effect(model: LatentGP, kernel: Kernel, x: Tensor) -> MultivariateNormal:
    """Return the posterior of one additive effect of a fitted model at inputs, a priori N(0, K_k).

    Serves every rule, and models with a design. With `active_dims` each kernel reads its own columns of the inputs; the
    other columns of x have no influence then. A group effect is a kernel of the group's number, such as an RBFKernel
    whose length scale is fixed at 0.05: groups are independent.

    Args:
        model: whose `forward` has a covariance that is a sum of kernels.
        kernel: one of these, or a sum of some.
        x: inputs (S, d) with the columns of the training inputs, or (S,) of one.

    Returns:
        The distribution (..., S) in the units of f; of a model of D latents (..., D, S), where they are independent.

    Raises:
        TypeError: no LatentGP, no kernel, or inputs in another dtype than the training inputs.
        ValueError: inputs that are not finite, or with another number of columns.
        NotImplementedError: the model has inducing inputs.

    Example:
        >>> import torch, gpytorch, gpext
        >>> from gpytorch.kernels import RBFKernel
        >>> class Model(gpext.models.LatentGP):
        ...     def __init__(self, x, y, likelihood):
        ...         super().__init__(x, y, likelihood)
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.of_age, self.of_dose = RBFKernel(active_dims=(0,)), RBFKernel(active_dims=(1,))
        ...
        ...     def forward(self, x):
        ...         covariance = self.of_age(x) + self.of_dose(x)
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), covariance)
        >>> x = torch.rand(20, 2)
        >>> model = Model(x, (x[:, 0] > 0.5).float(), gpext.likelihoods.BernoulliLogitLikelihood()).eval()
        >>> age = effect(model, model.of_age, torch.tensor([[0.1, 0.0], [0.9, 0.0]]))
        >>> bool(age.mean[0] < 0 < age.mean[1])
        True
    """
    if not isinstance(model, LatentGP):
        raise TypeError(f"expected a gpext.models.LatentGP; got {type(model).__qualname__}.")
    if not isinstance(kernel, Kernel):
        raise TypeError(f"expected a gpytorch kernel, a term of the model's covariance; got {kernel!r}.")
    check_tensor("inputs", x)
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    train_x = model.train_inputs[0]
    check_finite("inputs", x)
    check_dtype(x, train_x)
    check_columns(x, train_x)
    cross = accurate(kernel(train_x, x)).to_dense()
    covariance = accurate(kernel(x))
    zero = torch.zeros_like(cross[..., 0, :])
    return model.variational_strategy.predict(zero, cross, covariance)
