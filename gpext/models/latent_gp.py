"""A model that works like gpytorch's ExactGP, for any likelihood."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from torch import Tensor

from gpext.checks import check_finite, check_tensor
from gpext.designs import Design
from gpext.inference import KL, InferenceResult, Rule
from gpext.inference.problem import check_support
from gpext.likelihoods import LatentLikelihood
from gpext.likelihoods.noise_floor import bound_noise
from gpext.variational import LatentVariationalStrategy, check_columns, check_dtype
from gpext.variational.neighbour_choice import NeighbourChoice, NeighboursBy, Ordering, RegionSize


class LatentGP(ApproximateGP):
    """A Gaussian process on the full data with any likelihood: subclass it and write `forward`, as with ExactGP.

    In train mode `model(train_x)` is the prior there, for :class:`gpext.mlls.LatentMarginalLogLikelihood`; in eval mode
    `model(x)` is the posterior of f, and `likelihood(model(x))` the predictive distribution. A likelihood of D latents
    (`likelihood.num_latents`) needs a `forward` that returns a batch of D: give mean and kernel
    `batch_shape=torch.Size([D])`. A batch of inputs then needs a dimension for the latents, (..., 1, S, d), as it would
    stand for them otherwise.

    Args:
        train_inputs: X, (N, d), (N,) or (..., N, d); as the one entry of a tuple, too.
        train_targets: y, (..., N), or what the likelihood takes.
        likelihood: any gpext likelihood, or a gpytorch one that the rule supports. A trained `noise` of Student-t,
            Laplace or Matern-3/2 kind that has no constraint but `Positive` gets a
            :class:`gpext.likelihoods.NoiseFloor`: a scale of 1e-4 of the targets' spread (1e-3 in float32), below which
            noise cannot be distinguished from none.
        inference: a rule of `gpext.inference`; KL() by default.
        inducing_inputs: Z (M, d), for thousands of data: the prior is then the sparse one of M inducing inputs (FITC),
            a step takes O(N M^2), and Z is learnt as `variational_strategy.sparse_inputs`. See
            :func:`gpext.variational.kmeans_inducing_points`. None for the exact prior.
        design: A (N, P), a :class:`gpext.designs.Design`, if the N data depend on h = A f of the values at P inputs X
            (P, d): comparisons, sums, averages. In train mode the model then returns the prior of h; the posterior is
            of f, and another design at new inputs, `design(model(x))`, gives that of new data. None if datum i depends
            on f_i.
        neighbours: k, for tens of thousands of data in one to three dimensions: the prior is then that under which each
            f_i depends on the k nearest of those before it [Vecchia 1988], and on what `fill_in` adds, and new values
            depend on the 2 k nearest data. In two dimensions a step takes O(N k^3 + N^(3/2) k^(3/2)). It is exact for k
            = N - 1; 20 is usually enough. With inducing inputs, neighbours are of what these leave of the covariance,
            for more columns of inputs [Gyger et al. 2025], and stay where they are, unless
            `sparse_inputs.requires_grad_()` is called; likelihoods of several latents then need `KL`. Distances are in
            lengthscales; :func:`gpext.fit` chooses neighbours anew where training has changed their ratios by a
            quarter.
        ordering: of the data, with neighbours: "maximin", in which each is far from all before; "random"; "coordinate",
            along the widest axis; or "middle", from the middle outwards. The last two are faster in the plane.
        region_size: R, the largest number of data of a region, with neighbours: these are of a datum's own region, and
            a step takes O(N R^2). None for one region, as suits one to three columns; "auto" for regions of 2000 where
            a factor of the whole takes more than twice the operations: from some 3000 data on in ten columns, and
            more than 10^5 in two. See :class:`gpext.variational.neighbour_choice.NeighbourChoice`.
        neighbours_by: "distance", in lengthscales; "information": those of the 2 k nearest that together tell most of a
            value, by the kernel; or "correlation" by the kernel, which takes O(N^2) operations at each choice. The last
            is for kernels of which distances do not tell, as with a period; of others it is no better.
        fill_in: whether the prior has, beside the covariances of neighbours, all others that a factor of the
            posterior's precision has room for: it is exact in every clique of the filled graph, and each value depends
            on a few hundred others, in many columns on all of its region. In the plane posterior means are some fifty
            times nearer to the exact prior's, and an evaluation takes 1.3 to 2.4 times as long as by neighbours alone,
            for False.
        prediction_neighbours: the number E of data that a new value depends on; None for k, or with `fill_in` for 2 k,
            and at least 80 in more than three columns, where more are better. A prediction takes O(E^3) operations.

    Raises:
        TypeError: half precision, or something else than a rule for `inference`.
        NotImplementedError: neighbours together with a design.
        ValueError: inputs or targets are not finite, empty, or do not match, or targets are outside the
            support.

    Example:
        >>> import gpytorch, torch, gpext
        >>> class Model(gpext.models.LatentGP):
        ...     def __init__(self, x, y, likelihood):
        ...         super().__init__(x, y, likelihood)
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 1, 10)
        >>> likelihood = gpext.likelihoods.BernoulliLogitLikelihood()
        >>> model = Model(x, (x > 0.5).float(), likelihood).eval()
        >>> likelihood(model(x)).probs.shape
        torch.Size([10])
    """

    def __init__(
        self,
        train_inputs: Tensor | Sequence[Tensor],
        train_targets: Tensor,
        likelihood: Likelihood,
        inference: Rule | None = None,
        *,
        inducing_inputs: Tensor | None = None,
        design: Design | None = None,
        neighbours: int | None = None,
        ordering: Ordering = "maximin",
        region_size: RegionSize = "auto",
        neighbours_by: NeighboursBy = "distance",
        fill_in: bool = True,
        prediction_neighbours: int | None = None,
    ) -> None:
        train_inputs = _columns("inputs", train_inputs)
        if not isinstance(likelihood, Likelihood):
            raise TypeError(f"expected a likelihood of gpext or gpytorch; got {likelihood!r}.")
        _check(train_inputs, train_targets, likelihood, design)
        if inference is not None:
            check_rule(inference)
        if inducing_inputs is not None:
            inducing_inputs = _columns("inducing_inputs", inducing_inputs)
            check_finite("inducing_inputs", inducing_inputs)
            check_dtype(inducing_inputs, train_inputs)
            if inducing_inputs.dim() < 2 or inducing_inputs.shape[-1] != train_inputs.shape[-1]:
                raise ValueError(
                    f"expected inducing_inputs (M, {train_inputs.size(-1)}) like the training inputs; got "
                    f"{tuple(inducing_inputs.shape)}."
                )
        rule = KL() if inference is None else inference
        chosen = None
        if neighbours is not None:
            _check_neighbours(train_inputs, design)
            chosen = NeighbourChoice(
                neighbours,
                train_inputs.size(-1),
                ordering,
                region_size=region_size,
                by=neighbours_by,
                num_data=train_inputs.size(-2),
                fill_in=fill_in,
                to_predict=prediction_neighbours,
            )
        super().__init__(LatentVariationalStrategy(self, train_inputs, rule, inducing_inputs, design, chosen))
        self.likelihood = likelihood
        bound_noise(likelihood, train_targets)
        object.__setattr__(self, "_train_targets", train_targets)

    @property
    def train_inputs(self) -> tuple[Tensor]:
        """The training inputs, (..., N, d), as the one entry of a tuple."""
        return (self.variational_strategy.inducing_points,)

    @property
    def train_targets(self) -> Tensor:
        """The training targets."""
        return self._train_targets

    @property
    def design(self) -> Design | None:
        """The design, if the data depend on linear functions of f."""
        return self.variational_strategy.design

    @property
    def inference(self) -> Rule:
        """The rule; set it to another one to compare."""
        return self.variational_strategy.rule

    @inference.setter
    def inference(self, rule: Rule) -> None:
        check_rule(rule)
        self.variational_strategy.set_rule(rule)

    @property
    def result(self) -> InferenceResult:
        """The inference at the current parameters: sites, evidence, leave-one-out densities, status."""
        return self.variational_strategy.result()

    def set_train_data(
        self,
        inputs: Tensor | Sequence[Tensor] | None = None,
        targets: Tensor | None = None,
        strict: bool = True,
        *,
        design: Design | None = None,
    ) -> None:
        """Replace the training data; parameters stay as they are, the sites are reset.

        Args:
            inputs: new X, or None to keep it.
            targets: new y, or None to keep it.
            strict: demand the shapes, dtypes and devices of the current data, as gpytorch does.
            design: new A, or None to keep it.

        Raises:
            RuntimeError: `strict`, and they differ.
            TypeError, ValueError: as the constructor. Nothing has changed after an error.
        """
        new_inputs = self.train_inputs[0] if inputs is None else _columns("inputs", inputs)
        new_targets = self.train_targets if targets is None else targets
        check_tensor("targets", new_targets)
        if strict:
            for name, new, old in (
                ("inputs", new_inputs, self.train_inputs[0]),
                ("targets", new_targets, self.train_targets),
            ):
                for attribute in ("shape", "dtype", "device"):
                    expected, found = getattr(old, attribute), getattr(new, attribute)
                    if expected != found:
                        raise RuntimeError(
                            f"cannot modify {attribute} of {name} (expected {expected}, found {found}); pass "
                            "strict=False to allow it."
                        )
        new_design = self.design if design is None else design
        _check(new_inputs, new_targets, self.likelihood, new_design)
        bound_noise(self.likelihood, new_targets)
        self.variational_strategy.set_inputs(new_inputs, new_design)
        object.__setattr__(self, "_train_targets", new_targets)

    def get_fantasy_model(self, inputs: Tensor, targets: Tensor, **kwargs: Any) -> LatentGP:
        """Return a copy of this model, with the same parameters, that has more data; this one stays as it is.

        Args:
            inputs: more X, (..., m, d) or (m,); its batch dimensions broadcast with those of the training inputs.
            targets: as many y; a batch of them, (f, m), gives a batch of models.
            **kwargs: ignored, as by gpytorch's models.

        Raises:
            TypeError, ValueError: as the constructor.
            NotImplementedError: the model has a design, which more data would have to extend.
        """
        if self.design is not None:
            raise NotImplementedError(
                "more data of a model with a design need a design of all of them: call set_train_data(inputs, targets, "
                "strict=False, design=...) on a copy of the model."
            )
        inputs = _columns("inputs", inputs)
        check_tensor("targets", targets)
        check_dtype(inputs, self.train_inputs[0])
        check_columns(inputs, self.train_inputs[0])
        of_datum = self.likelihood.target_dims(targets) if isinstance(self.likelihood, LatentLikelihood) else 0
        model = copy.deepcopy(self).eval()
        model.set_train_data(
            _append(self.train_inputs[0], inputs, -2), _append(self.train_targets, targets, -1 - of_datum), strict=False
        )
        return model

    def pyro_guide(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: the rule finds q(f), and SVI has nothing to train.

        Raises:
            NotImplementedError: always, naming the alternatives.
        """
        raise NotImplementedError(
            "a LatentGP finds q(f) by its rule, not by SVI. In a Pyro program use gpext.ppl.latent_gp(name, "
            "model.forward(x)); for SVI an ApproximateGP with gpext.variational.SiteVariationalStrategy."
        )

    pyro_model = pyro_guide

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> LatentGP:
        object.__setattr__(self, "_train_targets", fn(self._train_targets))
        return super()._apply(fn, *args, **kwargs)

    def __call__(self, inputs: Tensor, prior: bool = False, **kwargs: Any) -> MultivariateNormal:
        """Return the prior at the training inputs in train mode, the posterior of f at any inputs in eval mode.

        Raises:
            RuntimeError: other inputs in train mode.
            TypeError: inputs in another dtype than the training inputs.
            ValueError: inputs that are not finite.
        """
        inputs = _columns("inputs", inputs)
        check_finite("inputs", inputs)
        check_dtype(inputs, self.train_inputs[0])
        check_columns(inputs, self.train_inputs[0])
        if self.training and settings.debug.on() and not torch.equal(inputs, self.train_inputs[0]):
            raise RuntimeError(
                "in train mode the model takes its training inputs; call model.eval() to predict, or "
                "model.set_train_data() to train on others."
            )
        return self.variational_strategy(inputs, prior=prior or self.training or settings.prior_mode.on(), **kwargs)


@contextmanager
def restricted_to(model: LatentGP, index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Make the data at `index` the only training data of a model within a block, and yield their inputs and targets.

    Inference within the block starts without sites. Afterwards, also after an exception, the model has its own training
    data and its own sites again; parameters, and the floors of noise that all data have set, are not touched.

    Args:
        model: the model.
        index: of the data (n,); with a design of its rows, of which only the inputs that they depend on remain.
    """
    strategy, targets = model.variational_strategy, model.train_targets
    inputs, design, sites = strategy.inducing_points, strategy.design, strategy.sites
    chosen = None if strategy.neighbours is None else strategy.neighbours.chosen
    index = index.to(inputs.device)
    some, rows = index, None
    if design is not None:
        some, rows = design.take(index).occupied()
    own = isinstance(model.likelihood, LatentLikelihood)
    part = model.likelihood.take(targets, index) if own else targets[..., index]
    try:
        strategy.set_inputs(inputs[..., some, :], rows)
        object.__setattr__(model, "_train_targets", part)
        yield strategy.inducing_points, part
    finally:
        strategy.set_inputs(inputs, design)
        object.__setattr__(model, "_train_targets", targets)
        if chosen is not None:
            strategy.neighbours.chosen = chosen
        if sites is not None:
            strategy.start_from(sites)


def _columns(name: str, x: Any) -> Tensor:
    """Return inputs (..., N, d), which gpytorch also passes as the one entry of a tuple."""
    if isinstance(x, tuple | list) and len(x) == 1:
        (x,) = x
    check_tensor(name, x)
    return x.unsqueeze(-1) if x.dim() == 1 else x


def _check_neighbours(inputs: Tensor, design: Design | None) -> None:
    if inputs.dim() > 2:
        raise ValueError(f"neighbours take one set of inputs, (N, d); got a batch, {tuple(inputs.shape)}.")
    if design is not None:
        raise NotImplementedError("neighbours with a design are not served; leave one of the two out.")


def _append(known: Tensor, more: Tensor, dim: int) -> Tensor:
    """Return two tensors concatenated along `dim`, the dimensions before it broadcast."""
    batch = torch.broadcast_shapes(known.shape[:dim], more.shape[:dim])
    return torch.cat([known.expand(*batch, *known.shape[dim:]), more.expand(*batch, *more.shape[dim:]).to(known)], dim)


def check_rule(rule: Any) -> None:
    """Raise TypeError unless it is an instance of a rule."""
    if isinstance(rule, type) or not hasattr(rule, "infer"):
        raise TypeError(f"inference must be an instance of a rule of gpext.inference, such as KL(); got {rule!r}.")


def _check(inputs: Tensor, targets: Tensor, likelihood: Likelihood, design: Design | None) -> None:
    check_tensor("targets", targets)
    if not isinstance(design, Design | None):
        raise TypeError(f"expected a gpext.designs.Design; got {type(design).__qualname__}. See designs.rows_of.")
    if inputs.dim() < 2 or inputs.size(-2) == 0:
        raise ValueError(f"expected at least one datum, inputs (..., N, d); got shape {tuple(inputs.shape)}.")
    if design is not None:
        data = likelihood.datum_shape(targets) if isinstance(likelihood, LatentLikelihood) else targets.shape
        if design.shape != (*data[-1:], inputs.size(-2)):
            raise ValueError(
                f"expected a design of a row a target and a column an input, {(*data[-1:], inputs.size(-2))}; got "
                f"{tuple(design.shape)}."
            )
    elif inputs.size(-2) not in targets.shape[-2:]:
        raise ValueError(
            f"inputs and targets must be equally many; got {tuple(inputs.shape)} and {tuple(targets.shape)}."
        )
    if inputs.dtype in (torch.float16, torch.bfloat16):
        raise TypeError(f"inputs in {inputs.dtype} are not supported; convert with x.float() or x.double().")
    check_finite("inputs", inputs)
    check_support(likelihood, targets)
