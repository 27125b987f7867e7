"""A kernel matrix as a LinearOperator that stores only its inputs: O(n) memory, exact products and derivatives."""

from __future__ import annotations

from functools import cached_property
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from linear_operator import to_linear_operator
from linear_operator.operators import LinearOperator
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpext.operators import compiled_tiles, keops_products, tiles
from gpext.operators.kernel_factors import factors_one_by_one, one_by_one, split_factors
from gpext.operators.profiles import FACTORS, smooth_value
from gpext.operators.tiles import Factor
from gpext.parallel import Ranks

Backend = Literal["auto", "tiles", "keops", "dense"]
_MOST_STORED = 2**24  # entries: 128 MiB in float64


class KernelOperator(LinearOperator):
    r"""s prod_f p_f(|x_f - y_f|^2) between n and m inputs, a product of stationary kernels (see `profiles`).

    Args:
        outputscale: s (..., 1, 1).
        tensors: of each factor in turn its inputs in units of the length scales, x (..., n, d) and, unless square,
            y (..., m, d); then, for rq, alpha (..., 1, 1).
        profiles: of each factor, a key of `gpext.operators.profiles.FACTORS`.
        square: whether the columns stand for the same inputs as the rows.
        backend: how products are computed. "tiles": a tile at a time, on a CPU by a program compiled at the first use
            on a machine, in some seconds, or by torch for rq and, with a warning, where it cannot be compiled;
            "keops": by KeOps, which compiles each formula, or, with a warning, by tiles where it cannot; "dense": by
            the dense matrix, recomputed for each; "auto": by KeOps on CUDA; elsewhere by tiles, or, up to 2^24
            entries, by a matrix that is stored at the first product.
        ranks: processes that have the same inputs and vectors and compute products together, a part of the tiles
            each; this one alone by default. A stored matrix is not divided among them.

    Raises:
        ValueError: the number or the shapes of the tensors do not match, or an unknown backend.

    Example:
        >>> import torch
        >>> x = torch.linspace(0, 1, 5).double().unsqueeze(-1)
        >>> K = KernelOperator(torch.full((1, 1), 2.0).double(), x, profiles=("rbf",), square=True)
        >>> K.shape, K.diagonal()
        (torch.Size([5, 5]), tensor([2., 2., 2., 2., 2.], dtype=torch.float64))
    """

    def __init__(
        self,
        outputscale: Tensor,
        *tensors: Tensor,
        profiles: tuple[str, ...],
        square: bool,
        backend: Backend = "auto",
        ranks: Ranks | None = None,
    ) -> None:
        batch = torch.broadcast_shapes(*(t.shape[:-2] for t in (outputscale, *tensors)))
        outputscale, *rest = (t.expand(*batch, *t.shape[-2:]) for t in (outputscale, *tensors))
        super().__init__(outputscale, *rest, profiles=profiles, square=square, backend=backend, ranks=ranks)
        self.ranks = Ranks.alone() if ranks is None else ranks
        self.outputscale, self.profiles, self.square, self.backend = outputscale, profiles, square, backend
        self.factors = split_factors(rest, profiles, square)

    def _check_args(
        self,
        outputscale: Tensor,
        *tensors: Tensor,
        profiles: tuple[str, ...],
        square: bool,
        backend: Backend = "auto",
        ranks: Ranks | None = None,
    ) -> str | None:
        if backend not in get_args(Backend):
            return f"expected a backend among {get_args(Backend)}; got {backend!r}."
        unknown = [profile for profile in profiles if profile not in FACTORS]
        expected = sum((1 if square else 2) + (profile == "rq") for profile in profiles)
        if unknown or not profiles or len(tensors) != expected:
            return (
                f"expected profiles among {sorted(FACTORS)} and {expected} tensors for {profiles}; got {len(tensors)}."
            )
        factors = split_factors(tensors, profiles, square)
        dtypes = {str(t.dtype) for t in (outputscale, *tensors)}
        if len(dtypes) > 1:
            return f"expected tensors of one dtype; got {' and '.join(sorted(dtypes))}. Convert kernels by .to(dtype)."
        if len({(f.x.size(-2), f.columns.size(-2)) for f in factors}) != 1:
            return "the factors of a product of kernels must have equally many inputs."
        return None

    # ---- products -------------------------------------------------------------------------------------------------

    def matmul(self, other: Tensor | LinearOperator) -> Tensor | LinearOperator:
        """Return K other."""
        if torch.is_tensor(other) and not (torch.is_grad_enabled() and (other.requires_grad or self.requires_grad)):
            return self._matmul(other)  # not by linear_operator, on whose copy the stored matrix would be lost
        return super().matmul(other)

    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        self._check_vectors(rhs, self.size(-1))
        if self.backend == "dense":
            return self.to_dense() @ rhs
        if torch.is_grad_enabled() and (rhs.requires_grad or self.requires_grad):
            return super().matmul(rhs)  # which calls this method again without gradients
        if self._is_stored:
            return self._stored @ rhs
        batch = torch.broadcast_shapes(self.batch_shape, rhs.shape[:-2])
        with torch.no_grad():
            pairs = list(zip(factors_one_by_one(self.factors, batch), one_by_one(rhs, batch), strict=True))
            like = rhs.new_empty(*batch, self.size(-2), rhs.size(-1))
            (out,) = self.ranks.sum(
                lambda: [torch.stack([self._route.product(*pair, self._part) for pair in pairs]).view(like.shape)],
                [like],
                alike=[rhs, *self._args],
                of=self._work,
            )
            return out * self.outputscale

    def _check_vectors(self, vectors: Tensor, size: int) -> None:
        """Raise for vectors of another size or dtype: the program would read beyond their memory.

        Raises:
            ValueError: the size or a dtype differs.
        """
        if vectors.size(-2) != size or any(t.dtype != vectors.dtype for t in self._args):
            dtypes = sorted({str(t.dtype) for t in self._args})
            raise ValueError(
                f"expected vectors (..., {size}, R) of {' and '.join(dtypes)}, as the inputs and parameters of the "
                f"kernel are; got {tuple(vectors.shape)} of {vectors.dtype}. Convert them by .to(dtype)."
            )

    @property
    def _part(self) -> tuple[int, int]:
        return self.ranks.rank, self.ranks.size

    @property
    def _work(self) -> str:
        """A description of the work that ranks share; each route divides a matrix differently."""
        return f"{' * '.join(self.profiles)}, {self.dtype}, by {self._route.__name__.rpartition('.')[-1]}"

    @property
    def _is_stored(self) -> bool:
        """Whether products without derivatives use a stored matrix."""
        return self.backend == "auto" and self.device.type != "cuda" and self.numel() <= _MOST_STORED

    @cached_property
    @torch.no_grad()
    def _stored(self) -> Tensor:
        """The matrix (..., n, m)."""
        each = [tiles.matrix(factors) for factors in factors_one_by_one(self.factors, self.batch_shape)]
        return (torch.stack(each) if self.batch_shape else each[0]).view(self.shape).mul_(self.outputscale)

    @torch.no_grad()
    def block(self, rows: slice, columns: slice, scale: Tensor) -> Tensor:
        """Return scale_i K_ij scale_j, scale (n,), of a matrix that is not a batch, in float32 except for distances."""
        scale = scale.to(self.dtype)
        left, right = scale[rows], scale[columns]
        if self._is_stored:
            return (self._stored[rows, columns] * right).mul_(left.unsqueeze(-1)).float()
        factors, left = self._factors_between(rows, columns), self.outputscale.squeeze() * left
        if compiled_tiles.serves(factors):
            return compiled_tiles.block(factors, left, right, torch.float32)
        return tiles.matrix(factors, torch.float32).mul_(right.float()).mul_(left.float().unsqueeze(-1))

    @property
    def points(self) -> Tensor:
        """The inputs of all factors (..., n, d), in units of the lengthscales."""
        return torch.cat([factor.x for factor in self.factors], -1)

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the entries in these rows and columns, each (B,), of a matrix that is not a batch."""
        return self._get_indices(rows, columns)

    @torch.no_grad()
    def columns(self, index: Tensor) -> Tensor:
        """Return columns (..., n, B), without derivatives."""
        if self.square and not self.batch_shape:
            factors = self._factors_between(index, slice(None))  # rows, equal to columns by symmetry
            if compiled_tiles.serves(factors):
                left, right = self.outputscale.view(-1).expand(len(index)), self.outputscale.new_ones(self.size(-1))
                return compiled_tiles.block(factors, left, right, self.dtype).mT
        return self[..., index].to_dense()

    def _factors_between(self, rows: slice | Tensor, columns: slice) -> list[Factor]:
        """Return the factors of a part of a matrix that is not a batch."""
        (factors,) = factors_one_by_one(self.factors, self.batch_shape)
        return [Factor(f.profile, f.x[rows], f.columns[columns], f.alpha) for f in factors]

    def bilinear_form(self, left: Tensor, right: Tensor) -> Tensor:
        """Return sum_r left_r' K right_r (...) for (..., n, R) and (..., m, R), value and derivatives from one pass.

        Derivatives of the derivatives are not available.
        """
        return _BilinearForm.apply(self, left, right, *self._args)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        if self.backend == "dense":
            return super()._bilinear_derivative(left_vecs, right_vecs)
        if left_vecs.dim() == 1:
            left_vecs, right_vecs = left_vecs.unsqueeze(-1), right_vecs.unsqueeze(-1)
        return tuple(t.sum_to_size(a.shape) for t, a in zip(self._pass(left_vecs, right_vecs), self._args, strict=True))

    def _pass(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor, ...]:
        """Return the derivatives of u' K v in each tensor, for each matrix of the batch (..., *)."""
        for vectors, size in ((left_vecs, self.size(-2)), (right_vecs, self.size(-1))):
            self._check_vectors(vectors, size)
        batch = torch.broadcast_shapes(self.batch_shape, left_vecs.shape[:-2], right_vecs.shape[:-2])
        scale, left, right = (one_by_one(t, batch) for t in (self.outputscale, left_vecs, right_vecs))

        def of_this_rank() -> list[Tensor]:
            each: list[list[Tensor]] = []
            for s, factors, u, v in zip(scale, factors_one_by_one(self.factors, batch), left, right, strict=True):
                found = self._route.derivatives(factors, u, v, self._part)
                gradients = [found.value.view(1, 1)]
                for x, y, alpha in zip(found.x, found.y, found.alpha, strict=True):
                    gradients += [s * t for t in (x, y) if t is not None]
                    gradients += [] if alpha is None else [s * alpha]
                each.append(gradients)
            return [torch.stack(column).view(*batch, *column[0].shape) for column in zip(*each, strict=True)]

        with torch.no_grad():
            like = [t.expand(*batch, *t.shape[-2:]) for t in self._args]
            return tuple(self.ranks.sum(of_this_rank, like, alike=[left_vecs, right_vecs, *self._args], of=self._work))

    @property
    def _route(self) -> ModuleType:
        """The module whose `product` and `derivatives` are used."""
        by_keops = self.backend == "keops" or (self.backend == "auto" and self.device.type == "cuda")
        if by_keops and keops_products.is_available(self.device.type):
            return keops_products
        return compiled_tiles if compiled_tiles.serves(self.factors) else tiles

    # ---- the interface of LinearOperator ----------------------------------------------------------------------------

    def _size(self) -> torch.Size:
        factor = self.factors[0]
        return torch.Size((*factor.x.shape[:-2], factor.x.size(-2), factor.columns.size(-2)))

    def _transpose_nonbatch(self) -> KernelOperator:
        if self.square:
            return self
        swapped = [t for f in self.factors for t in (f.columns, f.x, f.alpha) if t is not None]
        return self._of(self.outputscale, *swapped, square=False)

    def _diagonal(self) -> Tensor:
        if self.square:
            return self.outputscale.squeeze(-1).expand(*self.batch_shape, self.size(-1))
        total = self.outputscale.squeeze(-1)
        for f in self.factors:
            q = (f.x - f.columns).square().sum(-1)
            total = total * smooth_value(f.profile, q, None if f.alpha is None else f.alpha.squeeze(-1))
        return total

    def _get_indices(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Tensor:
        def numbers(t: Tensor) -> Tensor:
            return (t[batch_indices] if batch_indices else t).squeeze(-1).squeeze(-1)

        total = numbers(self.outputscale)
        for f in self.factors:
            difference = f.x[(*batch_indices, row_index)] - f.columns[(*batch_indices, col_index)]
            alpha = None if f.alpha is None else numbers(f.alpha)
            total = total * smooth_value(f.profile, difference.square().sum(-1), alpha)
        return total

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        tensors = [t[batch_indices] for t in self._args] if batch_indices else list(self._args)
        if row_index == slice(None) and col_index == slice(None):
            return self._of(*tensors)
        outputscale, *rest = tensors
        chosen = []
        for f in split_factors(rest, self.profiles, self.square):
            chosen += [f.x[..., row_index, :], f.columns[..., col_index, :]]
            chosen += [] if f.alpha is None else [f.alpha]
        return self._of(outputscale, *chosen, square=False)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        return self._of(*(t.expand(*batch_shape, *t.shape[-2:]) for t in self._args))

    def _mul_constant(self, other: float | Tensor) -> LinearOperator:
        other = torch.as_tensor(other, dtype=self.dtype, device=self.device)
        _, *rest = self._args
        scale = self.outputscale * other.unsqueeze(-1).unsqueeze(-1)
        return self._of(scale, *rest)

    def _mul_matrix(self, other: Tensor | LinearOperator) -> LinearOperator:
        if not isinstance(other, KernelOperator):  # linear_operator would use roots of a limited rank
            return to_linear_operator(self.to_dense() * other.to_dense())
        if other.square != self.square:  # as with factors of some columns of the inputs
            return self._rectangular()._mul_matrix(other._rectangular())
        (scale, *tensors), (other_scale, *others) = self._args, other._args
        backends = {self.backend, other.backend} - {"auto"}
        if len(backends) > 1:
            raise ValueError(f"expected one backend for the factors of a product of kernels; got {sorted(backends)}.")
        return KernelOperator(
            scale * other_scale,
            *tensors,
            *others,
            profiles=self.profiles + other.profiles,
            square=self.square,
            backend=backends.pop() if backends else "auto",
            ranks=self.ranks,
        )

    def _rectangular(self) -> KernelOperator:
        """Return the same matrix with separate inputs for its columns."""
        if not self.square:
            return self
        tensors = [t for f in self.factors for t in (f.x, f.x, f.alpha) if t is not None]
        return self._of(self.outputscale, *tensors, square=False)

    def _of(self, *tensors: Tensor, square: bool | None = None) -> KernelOperator:
        """Return the operator of other tensors with the same options."""
        own = self.square if square is None else square
        return KernelOperator(*tensors, profiles=self.profiles, square=own, backend=self.backend, ranks=self.ranks)

    def to_dense(self) -> Tensor:
        """Return the matrix (..., n, m), differentiable through torch."""
        total = self.outputscale
        for f in self.factors:
            distance = torch.cdist(f.x, f.columns, compute_mode="donot_use_mm_for_euclid_dist")
            total = total * smooth_value(f.profile, distance.square(), f.alpha)
        return total


class _BilinearForm(torch.autograd.Function):
    """u' K v, summed over columns, and its derivatives from one pass over the tiles."""

    @staticmethod
    def forward(ctx: Any, operator: KernelOperator, left: Tensor, right: Tensor, *tensors: Tensor) -> Tensor:
        """Return the form (...), and keep its derivatives in the tensors of K."""
        ctx.operator, ctx.shapes = operator, [t.shape for t in tensors]
        derivatives = operator._pass(left, right)
        ctx.save_for_backward(left, right, *derivatives)
        return (derivatives[0] * operator.outputscale).sum((-2, -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """Return nothing for the operator, g K v for u, g K' u for v, and g times each kept derivative."""
        left, right, *derivatives = ctx.saved_tensors
        g, (_, by_left, by_right, *_) = cotangent.unsqueeze(-1).unsqueeze(-1), ctx.needs_input_grad
        return (
            None,
            (g * (ctx.operator._matmul(right))).sum_to_size(left.shape) if by_left else None,
            (g * (ctx.operator.mT._matmul(left))).sum_to_size(right.shape) if by_right else None,
            *((g * t).sum_to_size(shape) for t, shape in zip(derivatives, ctx.shapes, strict=True)),
        )
