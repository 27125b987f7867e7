"""Maps, class probabilities and draws: the artists contain the data given."""

import numpy as np
import pytest
import torch

from gpext import plots

LINE = torch.linspace(0, 1, 6)
GRID = torch.cartesian_prod(LINE, 2 * LINE)


def test_a_surface_is_in_the_colours_of_its_scale_and_data_may_pass_its_ends(ax, labels):
    observed, targets = torch.tensor([[0.2, 0.4], [0.9, 1.0], [0.5, 0.5]]), torch.tensor([0.5, 40.0, 1.0])
    plots.surface_map(GRID, GRID.sum(-1), observed=observed, targets=targets, label="height", ax=ax)
    (bar,) = [axes for axes in ax.figure.axes if axes is not ax]
    assert bar.get_ylabel() == "height"
    dots = ax.collections[-1]
    np.testing.assert_allclose(dots.get_offsets(), observed)
    low, high = dots.get_clim()
    assert (low, high) == pytest.approx(ax.collections[0].get_clim())
    assert -0.2 < low <= 0
    assert 3 <= high < 3.2
    assert labels(ax) == ["observations"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("$x_1$", "$x_2$")


def test_a_constant_surface_is_drawn(ax):
    plots.surface_map(GRID, torch.full((36,), 7.0), ax=ax)
    ax.figure.draw_without_rendering()


def test_the_likeliest_class_has_its_colour_and_certainty_is_dark(ax, labels):
    sure = GRID[:, 0]
    order = torch.randperm(36, generator=torch.Generator().manual_seed(0))  # the order of the grid does not matter
    probs = torch.stack([1 - sure, sure], -1)
    targets = torch.tensor([0, 1, 1])
    plots.class_map(GRID[order], probs[order], observed=GRID[[0, 20, 35]], targets=targets, labels=["no", "yes"], ax=ax)
    pixels = np.asarray(ax.images[0].get_array())
    assert pixels.shape == (6, 6, 3)
    np.testing.assert_allclose(pixels, pixels[:1].repeat(6, 0))  # it depends on the first input alone
    left, right = pixels[0, 0], pixels[0, -1]
    assert left[2] > left[0]  # blue
    assert right[0] > right[2]  # orange
    assert pixels[0, 2].sum() > left.sum()  # paler
    assert labels(ax) == ["no", "yes"]
    assert [len(dots.get_offsets()) for dots in ax.collections] == [1, 2]


def test_class_probabilities_are_stacked_in_the_order_of_x(ax, labels):
    x = torch.tensor([1.0, 0.0])
    plots.class_probabilities(x, torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]]), ax=ax)
    assert labels(ax) == ["class 0", "class 1", "class 2"]
    tops = [band.get_paths()[0].vertices[:, 1].max() for band in ax.collections]
    np.testing.assert_allclose(tops, [0.6, 0.9, 1.0], rtol=1e-6)
    assert ax.get_ylim() == (0, 1)


def test_draws_have_a_row_a_number_and_a_colour_a_chain():
    draws = {"likelihood.noise": torch.rand(2, 50, 1), "covar_module.lengthscale": torch.rand(2, 50, 1, 2)}
    axes = plots.hyperparameter_draws(draws)
    assert axes.shape == (3, 2)
    assert [row[0].get_ylabel() for row in axes] == ["noise", "lengthscale[0]", "lengthscale[1]"]
    np.testing.assert_allclose(axes[2, 0].lines[1].get_ydata(), draws["covar_module.lengthscale"][1, :, 0, 1])
    names = [text.get_text() for text in axes[0, 1].get_legend().get_texts()]
    assert names[:2] == ["chain 0", "chain 1"]
    assert names[2] == f"mean {draws['likelihood.noise'].mean().item():.3g}"
    assert plots.hyperparameter_draws(draws, names=["likelihood.noise"]).shape == (1, 2)
    with pytest.raises(KeyError, match=r"no draws of nois; there are likelihood\.noise"):
        plots.hyperparameter_draws(draws, names=["nois"])
