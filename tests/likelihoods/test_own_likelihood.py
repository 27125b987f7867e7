"""A likelihood written from its base class's docstring alone, with targets (time, event), against its twin.

The twin takes one number per datum, the time with a minus sign if censored, and no side information.
"""

import doctest
import textwrap

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import VariationalELBO

from benchmarks.ep_schedules import SequentialEP
from gpext import FitStatus, fit
from gpext.inference import EP, KL, Laplace, Taylor, outlier_report
from gpext.likelihoods import LatentLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models import LatentGP
from tests.members import F64, rbf_prior
from tests.sparse_models import SparseGP


def from_docstring():
    """The class of the example in the docstring of LatentLikelihood."""
    names = {"LatentLikelihood": LatentLikelihood}
    text = textwrap.dedent(LatentLikelihood.__doc__.split("\n", 1)[1])
    for example in doctest.DocTestParser().get_examples(text):
        if example.source.startswith(("import", "from", "class")):
            exec(example.source, names)
    return names["SurvivalLikelihood"]


SurvivalLikelihood = from_docstring()


class Twin(LatentLikelihood):
    def __init__(self):
        super().__init__()
        self.own = SurvivalLikelihood()

    def unchecked_log_prob(self, targets, f):
        return self.own.unchecked_log_prob(torch.stack([targets.abs(), (targets > 0).to(targets)], -1), f)

    def forward(self, f):
        return self.own.forward(f)


def data(size=12):
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.rand(size, 1, generator=generator, dtype=F64)
    time = (torch.sin(2 * x[:, 0]) + 0.5 * torch.randn(size, generator=generator, dtype=F64)).exp()
    event = (torch.rand(size, generator=generator, dtype=F64) < 0.7).to(F64)
    return x, torch.stack([time, event], -1), torch.where(event == 1, time, -time)


class Model(LatentGP):
    def __init__(self, x, y, likelihood, rule):
        super().__init__(x, y, likelihood, rule)
        self.mean_module = gpytorch.means.ConstantMean().to(F64)
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).to(F64)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


RULES = {
    "kl": KL(),
    "kl, sequential": KL(schedule="sequential"),
    "laplace": Laplace(),
    "taylor": Taylor(),
    "ep": EP(),
    "ep, sequential": SequentialEP(damping=1.0),
}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_makes_of_it_what_it_makes_of_its_twin(name):
    x, pairs, signed = data()
    prior = rbf_prior(x)[0]
    ours = RULES[name].infer(prior, SurvivalLikelihood().double(), pairs)
    theirs = RULES[name].infer(prior, Twin().double(), signed)
    assert ours.status is theirs.status
    torch.testing.assert_close(ours.log_evidence, theirs.log_evidence, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.posterior.mean, theirs.posterior.mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(ours.log_loo, theirs.log_loo, rtol=1e-7, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kl", "laplace", "ep"])
def test_it_is_trained_and_predicts(name):
    x, pairs, signed = data()
    found = []
    for kind, y in ((SurvivalLikelihood, pairs), (Twin, signed)):
        model = Model(x, y, kind().double(), RULES[name])
        before = LatentMarginalLogLikelihood(model.likelihood, model)(model(x), y).item()
        result = fit(LatentMarginalLogLikelihood(model.likelihood, model), x, y, max_steps=8, progress=False)
        assert result.status in (FitStatus.CONVERGED, FitStatus.MAX_STEPS)
        assert result.objective > before
        found.append((result.objective, model.eval()))
    (ours, model), (theirs, twin) = found
    assert ours == pytest.approx(theirs, rel=1e-6)
    new_x = torch.linspace(0, 3, 5, dtype=F64)
    torch.testing.assert_close(
        model.likelihood.log_marginal(pairs, model(x)),
        twin.likelihood.log_marginal(signed, twin(x)),
        rtol=1e-3,
        atol=1e-3,
    )
    predicted = model.likelihood(model(new_x))
    assert predicted.batch_shape == (5,)
    low, high = predicted.quantile(torch.tensor(0.1, dtype=F64)), predicted.quantile(torch.tensor(0.9, dtype=F64))
    assert bool((low < high).all())
    torch.testing.assert_close(predicted.cdf(high), torch.full((5,), 0.9, dtype=F64), rtol=1e-5, atol=1e-5)
    # an event has the density of its time, a censored time the probability of exceeding it
    seen, exceeded = torch.ones(5, dtype=F64), torch.zeros(5, dtype=F64)
    of_events = model.likelihood.log_marginal(torch.stack([high, seen], -1), model(new_x))
    torch.testing.assert_close(predicted.log_prob(high), of_events, rtol=1e-6, atol=1e-6)
    of_survival = model.likelihood.log_marginal(torch.stack([high, exceeded], -1), model(new_x))
    torch.testing.assert_close(of_survival.exp(), torch.full((5,), 0.1, dtype=F64), rtol=1e-5, atol=1e-6)


def test_minibatches_take_pairs():
    x, pairs, _ = data(40)
    model, likelihood = SparseGP(torch.linspace(0, 3, 6, dtype=F64).unsqueeze(-1)), SurvivalLikelihood().double()
    elbo = VariationalELBO(likelihood, model, num_data=40)
    result = fit(elbo, x, pairs, batch_size=16, max_steps=4, progress=False)
    assert len(result.trace) == 4


def test_chunks_of_many_data_are_those_of_each():
    _, pairs, _ = data(5000)
    likelihood = SurvivalLikelihood().double()
    mean, variance = torch.linspace(-1, 1, 5000, dtype=F64), torch.full((5000,), 0.3, dtype=F64)
    whole = likelihood.expected_log_density(pairs, mean, variance)
    part = likelihood.expected_log_density(pairs[4990:], mean[4990:], variance[4990:])
    torch.testing.assert_close(whole[4990:], part, rtol=1e-8, atol=1e-8)


def test_it_refuses_what_it_has_no_density_for():
    x, pairs, _ = data()
    likelihood = SurvivalLikelihood().double()
    with pytest.raises(ValueError, match=r"targets must be pairs \(..., N, 2\); got shape \(12,\)"):
        KL().infer(rbf_prior(x)[0], likelihood, pairs[:, 0])
    with pytest.raises(ValueError, match="times must be positive"):
        likelihood.log_prob(-pairs, torch.zeros(12, dtype=F64))


def test_no_tail_probabilities_of_pairs():
    x, pairs, _ = data()
    report = outlier_report(Laplace().infer(rbf_prior(x)[0], SurvivalLikelihood().double(), pairs))
    assert bool(report.tail_probability.isnan().all())
