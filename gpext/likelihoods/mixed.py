"""A likelihood for each datum: counts, labels and measurements of one latent function, or of correlated ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Distribution

from gpext.bounds import num_latents
from gpext.checks import check_tensor, show_index, whole_number
from gpext.likelihoods.checks import floating
from gpext.likelihoods.composed import (
    ComposedLikelihood,
    Observed,
    check_inner,
    inner_density,
    inner_expected,
    inner_knots,
    inner_log_prob,
    inner_numbers,
    inner_point,
)
from gpext.likelihoods.latent import strip_of


class MixedLikelihood(ComposedLikelihood):
    r"""Data of several families: :math:`p(y_i | f_i) = p_{k_i}(y_i | f_i)`, the family k_i of each datum known.

    With a kernel over inputs and tasks, such as gpytorch's `IndexKernel` times a kernel of x, it is a joint model of
    outputs of different kinds: a row (x, task) for every output that was observed. An output that is missing is a row
    that is not there. The parameters of each family are trained with the others.

    Predictions are of one family: `likelihood(model(x), family=k)`.

    Where a family has several latents, as an angle has (:class:`VonMisesLikelihood`), num_latents is D, the largest
    number of any family, latents are (..., D, N), and a datum of a family of fewer depends on the first of them: give
    the mean and the kernel `batch_shape=torch.Size([D])`. `Taylor`, `Laplace`, `KL`, `EP` and the natural gradients of
    a `SiteVariationalStrategy` serve it.

    Args:
        likelihoods: of gpext or gpytorch, whose targets are one number; those of several latents are
            :class:`JointLikelihood`.
        index: k (N,), whole numbers from 0. If None, the last number of a target is its family: targets (..., N, 2).

    Raises:
        TypeError: something else than such likelihoods, or an index that is not whole.
        ValueError: no likelihood; an index out of range.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import BernoulliLogitLikelihood, PoissonLikelihood
        >>> likelihood = MixedLikelihood([PoissonLikelihood(), BernoulliLogitLikelihood()], torch.tensor([0, 1, 0]))
        >>> likelihood.log_prob(torch.tensor([0.0, 1.0, 1.0]), torch.zeros(3))
        tensor([-1.0000, -0.6931, -1.0000])
    """

    index: Tensor | None
    target_numbers = 2

    def __new__(cls, likelihoods: Sequence[Likelihood] = (), index: Tensor | None = None) -> MixedLikelihood:
        """Return an instance, of `JointMixedLikelihood` if a likelihood has several latents."""
        if cls is MixedLikelihood and any(num_latents(likelihood) is not None for likelihood in likelihoods):
            from gpext.likelihoods.mixed_joint import JointMixedLikelihood

            cls = JointMixedLikelihood
        return super().__new__(cls)

    def __init__(self, likelihoods: Sequence[Likelihood], index: Tensor | None = None) -> None:
        super().__init__()
        if not likelihoods:
            raise ValueError("expected at least one likelihood.")
        for number, likelihood in enumerate(likelihoods):
            if inner_numbers("MixedLikelihood", likelihood, several_latents=True) != 1:
                raise TypeError(
                    f"MixedLikelihood takes likelihoods whose target is one number; that of {number}, a "
                    f"{type(likelihood).__qualname__}, is several."
                )
        self.likelihoods = torch.nn.ModuleList(likelihoods)
        if index is not None:
            check_tensor("index", index)
            if index.is_floating_point() or index.dim() != 1:
                raise TypeError(
                    f"index must be whole numbers (N,), the family of each datum; got {index.dtype} of shape "
                    f"{tuple(index.shape)}. Convert with index.long()."
                )
            self._check_families(index)
            index = index.detach().clone()
        self.register_buffer("index", index, persistent=False)

    def datum_shape(self, targets: Tensor) -> torch.Size:
        """Return the shape of the data (..., N)."""
        return targets.shape[:-1] if self._is_joined(targets) else targets.shape

    def join(self, targets: Tensor) -> Tensor:
        """Return targets (..., N, 2) from targets (..., N) of all data.

        Raises:
            ValueError: there is no family for each of them.
        """
        if self._is_joined(targets):
            return targets
        if self.index is None or targets.shape[-1:] != self.index.shape:
            held = "no families" if self.index is None else f"the families of {len(self.index)} data"
            raise ValueError(
                f"MixedLikelihood holds {held}, and there are targets of shape {tuple(targets.shape)}. For a part of "
                "the data take likelihood.take(targets, index) of all, or put the families beside the targets: "
                "(..., N, 2)."
            )
        rows = targets if targets.is_floating_point() else targets.double()
        return torch.stack([rows, self.index.to(rows).expand(rows.shape)], -1)

    def take(self, targets: Tensor, index: Tensor | slice) -> Tensor:
        """Return the targets of the data at `index`, their families with them: (..., n, 2)."""
        return self.join(targets)[..., index, :]

    def check(self, targets: Tensor) -> None:
        """Raise unless every target is allowed for its family.

        Raises:
            TypeError: half precision.
            ValueError: a target outside the support of its family, both named with its row; an index out of range.
        """
        joined = self.join(targets)
        self._check_families(joined[..., 1])
        for number, likelihood, rows in self._families(joined):
            y = joined[..., rows, 0]
            try:
                check_inner(likelihood, y)
            except ValueError as error:
                row = next(int(i) for k, i in enumerate(rows) if not _is_allowed(likelihood, y[..., k : k + 1]))
                what = re.sub(r",? (first )?at index (\d+|\([\d, ]+\))", "", str(error))  # an index within the family
                raise ValueError(f"row {row}, of family {number} ({type(likelihood).__qualname__}): {what}") from error

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(y | f) (..., N) of each datum's family."""
        return self._by_family(inner_log_prob, targets, f)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, variance).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        return self._by_family(inner_expected, targets, mean, variance)

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, variance) df.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        return self._by_family(inner_density, targets, mean, variance)

    def knots(self, targets: Tensor) -> Tensor | None:
        """Return those of each datum's family."""
        joined = self.join(targets)
        found = [(rows, inner_knots(part, joined[..., rows, 0])) for _, part, rows in self._families(joined)]
        number = max((0 if knots is None else len(knots) for _, knots in found), default=0)
        if not number:
            return None
        everywhere = joined.new_zeros(number, *joined.shape[:-1])  # 0 is the least that harms
        for rows, knots in found:
            if knots is not None:
                everywhere[..., rows] = knots[-1:].expand(number, *knots.shape[1:]).to(everywhere)
                everywhere[: len(knots), ..., rows] = knots.to(everywhere)
        return everywhere

    def strip(self, targets: Tensor) -> Tensor:
        """Return that of each datum's family, 0 where it is not known."""
        joined = self.join(targets)
        strips = joined.new_zeros(joined.shape[:-1])
        for _, likelihood, rows in self._families(joined):
            strip = strip_of(likelihood, joined[..., rows, 0])
            if strip is not None:
                strips[..., rows] = strip.to(strips)
        return strips

    def expansion_point(self, targets: Tensor) -> Tensor:
        """Return where Taylor expands each datum's family."""
        joined = self.join(targets)
        point = joined.new_zeros(joined.shape[:-1])
        for _, likelihood, rows in self._families(joined):
            point[..., rows] = inner_point(likelihood, joined[..., rows, 0]).to(point)
        return point

    def forward(self, function_samples: Tensor, *args: Any, family: int | None = None, **kwargs: Any) -> Distribution:
        """Return p(y | f) of one family.

        Raises:
            NotImplementedError: no family: data of several are no one distribution.
        """
        return self._family(family).forward(function_samples, *args, **kwargs)

    def marginal(
        self, function_dist: MultivariateNormal, *args: Any, family: int | None = None, **kwargs: Any
    ) -> Distribution:
        """Return p(y) of one family at the marginals of function_dist.

        Raises:
            NotImplementedError: no family: data of several are no one distribution.
        """
        return self._family(family).marginal(function_dist, *args, **kwargs)

    def observed(self, targets: Tensor, mean: Tensor) -> list[Observed]:
        """Return the data of each family."""
        joined = self.join(targets)
        return [
            Observed(rows, likelihood, joined[..., rows, 0], mean[..., rows])
            for _, likelihood, rows in self._families(joined)
        ]

    def _family(self, family: int | None) -> Any:
        if family is None:
            raise NotImplementedError(
                "data of several families are not one distribution: name one, likelihood(model(x), family=0)."
            )
        if not 0 <= whole_number("family", family, 0) < len(self.likelihoods):
            raise ValueError(f"family must be from 0 to {len(self.likelihoods) - 1}; got {family}.")
        return self.likelihoods[family]

    def _is_joined(self, targets: Tensor) -> bool:
        return targets.dim() > 1 and targets.size(-1) == 2

    def _check_families(self, index: Tensor) -> None:
        wrong = (index < 0) | (index >= len(self.likelihoods)) | (index != floating(index).round())
        if bool(wrong.any()):
            place = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(
                f"families must be from 0 to {len(self.likelihoods) - 1}; got {float(index[place]):g} at index "
                f"{show_index(place)}."
            )

    def _families(self, joined: Tensor) -> list[tuple[int, Any, Tensor]]:
        """Return number, likelihood and rows of each family that occurs.

        Raises:
            ValueError: the families of a batch differ.
        """
        index = joined[..., 1].reshape(-1, joined.size(-2))
        if not bool((index == index[:1]).all()):
            raise ValueError("all targets of a batch must have the same families in the same places.")
        found = [(k, part, (index[0] == k).nonzero().squeeze(-1)) for k, part in enumerate(self.likelihoods)]
        return [each for each in found if len(each[2])]

    def _by_family(self, function: Callable[..., Tensor], targets: Tensor, *latents: Tensor) -> Tensor:
        """Return function(likelihood, targets, *latents) (..., N), family by family."""
        joined = self.join(targets)
        latents = torch.broadcast_tensors(*latents, joined[..., 0].to(latents[0].dtype))[: len(latents)]
        found = []
        for _, likelihood, rows in self._families(joined):
            at = [each[..., rows] for each in latents]
            found.append((rows, function(likelihood, joined[..., rows, 0], *at).to(latents[0].dtype)))
        return in_order(found)


def in_order(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return values (..., N) of all data from pairs of indices (n,) and values (..., n)."""
    order = torch.cat([rows for rows, _ in parts]).argsort()
    return torch.cat([values for _, values in parts], -1)[..., order]


def _is_allowed(likelihood: Any, targets: Tensor) -> bool:
    try:
        check_inner(likelihood, targets)
    except ValueError:
        return False
    return True
