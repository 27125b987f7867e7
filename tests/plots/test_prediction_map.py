"""Maps of predictions: the artists contain the posterior's numbers, in closed form where there is one."""

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from matplotlib import colormaps
from scipy import stats
from torch.distributions import StudentT

import gpext
from gpext import plots
from gpext.distributions import LatentNormal
from gpext.inference import Laplace
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    MultinomialLogitLikelihood,
    Offset,
    PoissonLikelihood,
    VonMisesLikelihood,
)
from gpext.plots import map_numbers

F64 = torch.float64
LINES = torch.linspace(0, 1, 4, dtype=F64), torch.linspace(0, 2, 3, dtype=F64)
GRID = torch.cartesian_prod(*LINES)
MEAN, SD = torch.linspace(-1, 2, 12, dtype=F64), torch.linspace(0.1, 1.5, 12, dtype=F64)
F = MultivariateNormal(MEAN, torch.diag(SD.square()))
X = torch.rand(30, 2, generator=torch.Generator().manual_seed(0), dtype=F64)


class Model(gpext.models.LatentGP):
    def __init__(self, x, y, likelihood, **options):
        super().__init__(x, y, likelihood, Laplace(), **options)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5))
        self.to(x)
        self.inputs_seen = []

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def __call__(self, x, *args, **kwargs):
        self.inputs_seen.append(len(x))
        return super().__call__(x, *args, **kwargs)


def classes(x=X, **options):
    return Model(x, (x[:, 0] > 0.5).to(x), BernoulliLogitLikelihood(), **options).eval()


def shown(ax):
    """The numbers of the first artist, of an image (n_x, n_y) by column as those of the grid; masked ones are nan."""
    values = ax.collections[0].get_array()
    values = np.ma.filled(values.astype(float), np.nan)
    return values.T.ravel() if values.ndim == 2 else values


def scale_of(ax):
    return ax.collections[0].colorbar


def test_a_normal_distribution_has_a_map_of_each_of_its_numbers():
    axes = plots.map(F, LINES, threshold=0.3)
    for ax, expected in zip(axes, (MEAN, SD, stats.norm.sf(0.3, MEAN, SD)), strict=True):
        np.testing.assert_allclose(shown(ax), expected, rtol=1e-12)
        assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_aspect()) == ("$x_1$", "$x_2$", 1)
        np.testing.assert_allclose([*ax.get_xlim(), *ax.get_ylim()], [-1 / 6, 7 / 6, -0.5, 2.5])
    labels = ["mean", "standard deviation", "probability of exceeding 0.3"]
    assert [scale_of(ax).ax.get_ylabel() for ax in axes] == labels
    assert [ax.collections[0].get_clim() for ax in axes] == [(-1, 2), (0, 1.5), (0, 1)]
    axes[0].figure.draw_without_rendering()


def test_a_function_of_f_has_the_moments_and_tails_of_its_law():
    rate = stats.lognorm(SD, scale=MEAN.exp())
    axes = plots.map(F, LINES, of=torch.exp, threshold=1.7, name="trees")
    for ax, expected in zip(axes, (rate.mean(), rate.std(), rate.sf(1.7)), strict=True):
        np.testing.assert_allclose(shown(ax), expected, rtol=1e-8)
    assert scale_of(axes[2]).ax.get_ylabel() == "P(trees > 1.7)"
    (falling,) = plots.map(F, LINES, of=lambda f: -f.exp(), threshold=-1.7, show="exceedance")
    np.testing.assert_allclose(shown(falling), rate.cdf(1.7), atol=1e-12)
    (step,) = plots.map(F, LINES, of=torch.floor, threshold=1.0, show="exceedance")  # floor(f) > 1 where f >= 2
    np.testing.assert_allclose(shown(step), stats.norm.sf(2, MEAN, SD), rtol=1e-8)
    assert scale_of(falling).ax.get_ylabel() == "P(g(f) > -1.7)"


@pytest.mark.parametrize(("threshold", "expected"), [(-0.1, 1.0), (0.0, 1.0), (1.0, 0.0), (2.0, 0.0)])
def test_a_threshold_outside_the_range_of_a_function_is_certain(threshold, expected):
    (ax,) = plots.map(F, LINES, of=torch.sigmoid, threshold=threshold, show="exceedance")
    np.testing.assert_array_equal(shown(ax), np.full(12, expected))


def test_what_is_known_exceeds_what_is_less():
    known = LatentNormal(MEAN, DiagLinearOperator(torch.zeros(12, dtype=F64)))
    (ax,) = plots.map(known, LINES, threshold=float(MEAN[5]), show="exceedance")
    np.testing.assert_array_equal(shown(ax), [0.0] * 6 + [1.0] * 6)


def test_observations_of_a_likelihood_have_their_own_numbers():
    likelihood = PoissonLikelihood()
    axes = plots.map(F, LINES, of=likelihood, threshold=2.5)
    predictive = likelihood(F)
    for ax, expected in zip(axes, (predictive.mean, predictive.variance.sqrt(), None), strict=True):
        if expected is not None:
            np.testing.assert_allclose(shown(ax), expected)
    counts = torch.arange(3, dtype=F64).unsqueeze(-1)
    np.testing.assert_allclose(shown(axes[2]), 1 - predictive.log_prob(counts).exp().sum(0), atol=1e-9)
    assert scale_of(axes[0]).ax.get_ylabel() == "mean of y"
    (ax,) = plots.map(F, LINES, of=BernoulliLogitLikelihood(), threshold=0.5, show="exceedance")
    np.testing.assert_allclose(shown(ax), BernoulliLogitLikelihood()(F).probs)


@pytest.mark.parametrize("neighbours", [None, 5])
def test_a_model_predicts_what_it_predicts_of_all_inputs_at_once(neighbours, monkeypatch):
    model = classes(neighbours=neighbours)
    monkeypatch.setattr(map_numbers, "_ROWS", 5)
    mean, sd = plots.map(model, LINES)
    assert model.inputs_seen == [1, 5, 5, 2]  # the first on its own, before the remaining time is counted
    with torch.no_grad():
        f = model(GRID)
        np.testing.assert_allclose(shown(mean), f.mean, rtol=1e-10)
        np.testing.assert_allclose(shown(sd), f.variance.sqrt(), rtol=1e-10)
    assert scale_of(mean).ax.get_ylabel() == "mean of f"
    (chance,) = plots.map(model, LINES, of=torch.sigmoid, show="mean")
    np.testing.assert_allclose(shown(chance), model.likelihood(f).probs, rtol=1e-6)
    assert scale_of(chance).ax.get_ylabel() == "mean of sigmoid(f)"


def test_the_bar_begins_after_the_first_prediction_and_counts_inputs(monkeypatch):
    model, events = classes(), []

    class Bar(map_numbers.Progress):
        def __init__(self, name, total, *, shown):
            events.append((len(model.inputs_seen), total, shown))
            super().__init__(name, total, shown=shown)

        def update(self, count=1):
            events.append(count)

    monkeypatch.setattr(map_numbers, "_ROWS", 8)
    monkeypatch.setattr(map_numbers, "Progress", Bar)
    plots.map(model, LINES, progress=False)
    assert events == [(1, 12, False), 8, 4]


def test_without_inputs_a_grid_covers_those_of_the_training():
    model = classes(X.float())
    (ax,) = plots.map(model, show="sd")
    assert ax.collections[0].get_array().shape == (100, 100)
    edges = ax.collections[0].get_coordinates()
    middles = (edges[:, 1:] + edges[:, :-1]) / 2
    np.testing.assert_allclose(
        [middles[..., 0].min(), middles[..., 0].max()], [X[:, 0].min(), X[:, 0].max()], rtol=1e-5
    )
    plots.map(model, tuple(line.numpy() for line in LINES))  # in the dtype of the model


def test_what_a_mask_leaves_out_is_neither_predicted_nor_drawn():
    model, mask = classes(), torch.ones(4, 3, dtype=torch.bool)
    mask[1:3, 1] = False
    (ax,) = plots.map(model, LINES, mask=mask, show="mean")
    assert model.inputs_seen == [1, 10]
    np.testing.assert_array_equal(np.isnan(shown(ax)), ~mask.flatten())
    (given,) = plots.map(F, LINES, mask=mask.numpy(), show="mean")
    np.testing.assert_array_equal(shown(given)[mask.flatten()], MEAN[mask.flatten()])
    assert np.isnan(shown(given)).sum() == 2


def test_a_grid_in_any_order_and_with_holes_is_an_image():
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))[:9]
    (ax,) = plots.map(F[order], GRID[order], show="mean")
    expected = np.full(12, np.nan)
    expected[order] = MEAN[order]
    np.testing.assert_array_equal(shown(ax), expected)


def test_scattered_places_are_dots_or_triangles():
    f = MultivariateNormal(X[:, 0], torch.eye(30, dtype=F64))
    (dots,) = plots.map(f, X, show="mean")
    np.testing.assert_allclose(dots.collections[0].get_offsets(), X)
    np.testing.assert_array_equal(shown(dots), X[:, 0])
    (triangles,) = plots.map(f, X, show="mean", style="triangles", aspect=1.3)
    np.testing.assert_array_equal(shown(triangles), X[:, 0])
    assert triangles.get_aspect() == 1.3
    triangles.figure.draw_without_rendering()
    (one,) = plots.map(f[:1], X[:1], show="mean")  # one place
    one.figure.draw_without_rendering()
    twice = torch.cat([GRID, GRID])
    (dots,) = plots.map(MultivariateNormal(MEAN.repeat(2), torch.eye(24, dtype=F64)), twice, show="mean")
    assert len(dots.collections[0].get_offsets()) == 24  # no cell can have two colours


def test_inputs_of_more_columns_are_drawn_at_their_places():
    x = torch.cat([GRID / 10, GRID[:, :1]], -1)
    y = (GRID[:, 0] > 0.4).double()
    (ax,) = plots.map(Model(x, y, BernoulliLogitLikelihood()).eval(), x, places=GRID, show="mean")
    np.testing.assert_allclose([*ax.get_xlim(), *ax.get_ylim()], [-1 / 6, 7 / 6, -0.5, 2.5])


def test_colours_diverge_equally_from_a_midpoint_and_limits_are_extended():
    (ax,) = plots.map(F, LINES, midpoint=0.5, show="mean")
    assert ax.collections[0].get_clim() == (-1, 2)
    (ax,) = plots.map(F, LINES, midpoint=0.0, show="mean")
    assert ax.collections[0].get_clim() == (-2, 2)
    assert ax.collections[0].get_cmap() == colormaps["PuOr_r"]
    for limits, extend in (((-1, 1), "max"), ((0, 1), "both"), ((0, 9), "min"), ((-9, 9), "neither")):
        (ax,) = plots.map(F, LINES, limits=limits, show="mean")
        assert ax.collections[0].get_clim() == limits
        assert scale_of(ax).extend == extend
    (ax,) = plots.map(F, LINES, midpoint=0.1, show="mean")  # 0.1 - (0.1 - (-1)) is not -1
    assert scale_of(ax).extend == "neither"
    same = MultivariateNormal(torch.full((12,), 7.0), torch.eye(12))
    for ax in plots.map(same, LINES, midpoint=7.0):
        ax.figure.draw_without_rendering()


def test_data_are_dots_that_do_not_widen_the_map(labels):
    observed, targets = torch.tensor([[0.2, 0.4], [9.0, 1.0]]), torch.tensor([0.5, 40.0])
    mean, sd = plots.map(F, LINES, observed=observed, targets=targets)
    for ax in (mean, sd):
        np.testing.assert_allclose(ax.collections[1].get_offsets(), observed)
        np.testing.assert_allclose(ax.get_xlim(), [-1 / 6, 7 / 6])
    np.testing.assert_array_equal(mean.collections[1].get_array(), targets)
    assert mean.collections[1].get_clim() == mean.collections[0].get_clim()
    assert labels(mean) == ["observations"]
    assert sd.get_legend() is None
    many = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0))
    (ax,) = plots.map(F, LINES, observed=many, show="mean")
    assert ax.collections[1].get_sizes() * 2000 < 1e4  # they do not hide the map
    ax.figure.draw_without_rendering()


def test_panels_are_drawn_on_given_axes_and_wide_maps_above_one_another(ax):
    assert plots.map(F, LINES, show="sd", axes=ax) == [ax]
    wide = plots.map(F, (8 * LINES[0], LINES[1]))
    tops = [each.get_position().y0 for each in wide]
    assert tops[0] > tops[1]
    with pytest.raises(ValueError, match="expected axes for 2 panels, mean, sd; got 1"):
        plots.map(F, LINES, axes=[ax])


def test_an_offset_is_zero_and_a_design_of_the_data_is_not_needed():
    likelihood = Offset(PoissonLikelihood(), torch.full((30,), 2.0, dtype=F64))
    model = Model(X, torch.ones(30, dtype=F64), likelihood).eval()
    rate, count = (plots.map(model, LINES, of=of, show="mean")[0] for of in (torch.exp, likelihood))
    np.testing.assert_allclose(shown(rate), shown(count), rtol=1e-8)


BATCH = MultivariateNormal(torch.zeros(2, 12), torch.eye(12))
TASKS = MultitaskMultivariateNormal(torch.zeros(12, 2), torch.eye(24))


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (lambda: plots.map(3, LINES), TypeError, "expected a model in eval mode, or a distribution; got int"),
        (lambda: plots.map(classes().train()), RuntimeError, r"in train mode; call model\.eval\(\)"),
        (lambda: plots.map(F), ValueError, r"give inputs \(S, d\)"),
        (lambda: plots.map(classes(torch.rand(9, 3, dtype=F64))), ValueError, r"training inputs \(N, 2\)"),
        (
            lambda: plots.map(F, [GRID]),
            ValueError,
            r"\(n_x,\) and \(n_y,\) of a grid; got \(12, 2\)",
        ),
        (lambda: plots.map(F, GRID[:, 0]), ValueError, r"expected inputs \(S, d\), one or more; got shape \(12,\)"),
        (lambda: plots.map(F, GRID[:0]), ValueError, r"got shape \(0, 2\)"),
        (lambda: plots.map(F, torch.rand(12, 3)), ValueError, r"inputs must have shape \(N, 2\)"),
        (lambda: plots.map(F, GRID, places=GRID[1:]), ValueError, r"a place of each input, \(12, 2\); got \(11, 2\)"),
        (lambda: plots.map(classes(), (LINES[0], LINES[1] / 0)), ValueError, "inputs must be finite"),
        (lambda: plots.map(F, GRID[1:]), ValueError, "expected a distribution of 11 values, one an input; got 12"),
        (lambda: plots.map(BATCH, LINES), TypeError, "has no such figure"),
        (lambda: plots.map(TASKS, LINES), TypeError, "has no such figure"),
        (lambda: plots.map(BATCH, LINES, of=VonMisesLikelihood()), TypeError, r"draw plots\.class_map of classes"),
        (lambda: plots.map(BATCH, LINES, of=MultinomialLogitLikelihood(2)), TypeError, r"plots\.class_map"),
        (
            lambda: plots.map(PoissonLikelihood()(F), LINES, of=torch.exp),
            TypeError,
            "needs a normal distribution of f",
        ),
        (
            lambda: plots.map(F, LINES, of=torch.square, threshold=1.0),
            ValueError,
            "expected an increasing or decreasing function of f",
        ),
        (
            lambda: plots.map(StudentT(torch.full((12,), 1.5)), LINES, show="sd"),
            ValueError,
            "the sd is not finite at 12 of 12 inputs",
        ),
        (lambda: plots.map(F, LINES, show="median"), ValueError, "show must be one or more of mean, sd, exceedance"),
        (lambda: plots.map(F, LINES, show=[]), ValueError, "show must be one or more"),
        (lambda: plots.map(F, LINES, show="exceedance"), ValueError, "takes a threshold, a finite number; got None"),
        (lambda: plots.map(F, LINES, threshold=torch.nan), ValueError, "takes a threshold, a finite number; got nan"),
        (lambda: plots.map(F, LINES, style="contours"), ValueError, "style must be 'image', 'points' or 'triangles'"),
        (lambda: plots.map(F, X[:12], style="image"), ValueError, "an image takes places on a rectangular grid"),
        (lambda: plots.map(F[:4], GRID[::3], style="triangles"), ValueError, "three places or more that are not on a"),
        (lambda: plots.map(F, LINES, mask=torch.ones(12)), ValueError, "expected a mask of 12 truth values"),
        (lambda: plots.map(F, LINES, mask=torch.ones(11) > 0), ValueError, "expected a mask of 12 truth values"),
        (lambda: plots.map(F, LINES, mask=torch.ones(12) < 0), ValueError, "the mask leaves no input to draw"),
        (lambda: plots.map(F, LINES, midpoint=0.0, limits=(0, 1)), ValueError, "exclude each other"),
        (lambda: plots.map(F, LINES, limits=(1, 0)), ValueError, "limits must be a lower and a higher number"),
        (lambda: plots.map(F, LINES, observed=X[:2], targets=X[:3, 0]), ValueError, "expected one value a point"),
    ],
)
def test_bad_input_is_refused(draw, error, message):
    with pytest.raises(error, match=message):
        draw()
