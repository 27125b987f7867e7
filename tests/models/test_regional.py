"""Predictions by regions against those of the whole model."""

import pytest
import torch

import gpext
from gpext.inference import InferenceWarning, Laplace
from gpext.likelihoods import MultinomialLogitLikelihood, PoissonLikelihood
from gpext.linalg.regions import regions
from gpext.models import compact_subset, predict_by_regions
from tests.members import F64
from tests.models.test_neighbours import Model


def problem(n=400):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 2, generator=generator, dtype=F64)
    y = torch.poisson((2 * torch.sin(6 * x[:, 0])).exp(), generator=generator)
    model = Model(x, y, PoissonLikelihood(), Laplace(), neighbours=8, fill_in=True)
    return model, torch.cat([torch.rand(50, 2, generator=generator, dtype=F64), x[:1], 2 + x[:1]])


def test_regions_divide_points_and_all_of_space():
    x, others = problem()[0].train_inputs[0], torch.randn(100, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    found = list(regions(x, others, 70))
    assert all(len(region.points) <= 70 for region in found)
    assert torch.equal(torch.cat([region.points for region in found]).sort().values, torch.arange(400))
    assert torch.equal(torch.cat([region.others for region in found]).sort().values, torch.arange(100))
    for region in found:
        own, around = x[region.points], x[region.with_margin(x, 2.0)]
        assert set(region.points.tolist()) <= set(region.with_margin(x, 2.0).tolist())
        inside = ((x >= own.amin(0)) & (x <= own.amax(0))).all(-1).sum()
        assert len(around) >= int(inside)


def test_equal_points_end():
    assert [len(region.points) for region in regions(torch.zeros(9, 2), torch.zeros(3, 2), 2)] == [9]


def test_one_region_is_the_whole_model():
    model, new = problem()
    with torch.no_grad():
        expected = model.eval()(new)
    found = predict_by_regions(model, new, progress=False)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.variance, expected.variance)


def test_a_wider_margin_comes_nearer_to_the_whole_model():
    model, new = problem()
    with torch.no_grad():
        expected = model.eval()(new)
    sites = model.variational_strategy.sites
    errors = []
    for margin in (0.5, 20.0):
        found = predict_by_regions(model, new, size=60, margin=margin, progress=False)
        errors.append(float(((found.mean - expected.mean) / expected.variance.sqrt()).abs().max()))
    assert errors[1] < 0.02
    assert errors[1] < 0.2 * errors[0]
    assert torch.equal(model.variational_strategy.sites.shift, sites.shift)
    assert len(model.train_targets) == 400
    assert model.likelihood(found).mean.shape == (len(new),)


def test_regions_that_do_not_converge_are_counted():
    model, new = problem()
    model.inference = Laplace(max_steps=1)
    with pytest.warns(InferenceWarning, match=r"has not converged in (\d) of \1 regions"):
        predict_by_regions(model, new, size=60, progress=False)


def test_hyperparameters_are_learned_on_whole_regions():
    model, _ = problem()
    (x,) = model.train_inputs
    index = compact_subset(x, 3, size=60)
    assert len(index) == len(set(index.tolist())) <= 180
    assert torch.equal(index, compact_subset(x, 3, size=60))
    near = torch.cdist(x[index], x[index]).fill_diagonal_(1).amin(-1).median()
    spread = x[torch.randperm(400, generator=torch.Generator().manual_seed(0))[: len(index)]]
    assert float(near) < float(torch.cdist(spread, spread).fill_diagonal_(1).amin(-1).median())


def test_bad_input():
    model, new = problem(20)
    (x,) = model.train_inputs
    with pytest.raises(TypeError, match="with neighbours"):
        predict_by_regions(Model(x, model.train_targets, PoissonLikelihood(), Laplace()), new)
    with pytest.raises(ValueError, match="new inputs"):
        predict_by_regions(model, new[0])
    with pytest.raises(ValueError, match="margin"):
        predict_by_regions(model, new, margin=0)
    with pytest.raises(ValueError, match="size"):
        predict_by_regions(model, new, size=0)
    classes = Model(x, torch.arange(20) % 3, MultinomialLogitLikelihood(3), Laplace(), neighbours=3)
    with pytest.raises(NotImplementedError, match="one latent"):
        predict_by_regions(classes, new)
    assert isinstance(model, gpext.models.LatentGP)
