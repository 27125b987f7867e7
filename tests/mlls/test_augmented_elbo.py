"""The augmented ELBO in unchanged gpytorch scripts: it never falls, and stays below VariationalELBO."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import VariationalStrategy

import gpext
from gpext.likelihoods import StudentTLikelihood
from gpext.mlls import AugmentedELBO
from tests.members import F64, MEMBERS, student_t
from tests.sparse_models import SparseGP, inputs, randomise

N, M = 30, 7


@pytest.fixture(params=MEMBERS)
def member(request):
    return MEMBERS[request.param]


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_a_stock_script_with_ngd_never_decreases_the_bound(member, rate):
    """The drop-in route: gpytorch's strategy, natural q(u) and NGD, unchanged."""
    model = SparseGP(inputs(M, 2), strategy=VariationalStrategy).train()
    x, y = inputs(N, 2, seed=1), member.targets(N)
    mll = AugmentedELBO(member.likelihood, model, num_data=N)
    optimizer = gpytorch.optim.NGD(model.variational_parameters(), num_data=N, lr=rate)
    values = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        optimizer.step()
        values.append(-loss.item())
    values = torch.tensor(values, dtype=F64)
    assert bool((values.diff() >= -1e-12 * values.abs().max()).all())
    assert values[-1] > values[0] + 1e-3


def test_bound_is_below_the_variational_elbo(member):
    for seed in range(5):
        model = randomise(SparseGP(inputs(M, 2)), seed).train()
        x, y = inputs(N, 2, seed=1), member.targets(N)
        q = model(x)
        augmented, exact = (
            kind(member.likelihood, model, num_data=N)(q, y) for kind in (AugmentedELBO, VariationalELBO)
        )
        assert augmented.item() < exact.item()


def test_terms_are_the_bound_a_datum_the_divergence_and_the_priors():
    likelihood = student_t(noise_prior=gpytorch.priors.GammaPrior(2.0, 3.0))
    model = randomise(SparseGP(inputs(M, 2))).train()
    x, y = inputs(10, 2, seed=1), MEMBERS["student_t"].targets(10)
    q = model(x)
    terms = AugmentedELBO(likelihood, model, num_data=N, beta=0.5, combine_terms=False)(q, y)
    torch.testing.assert_close(terms[0], likelihood.augmented_bound(y, q).mean())
    torch.testing.assert_close(terms[1], 0.5 * model.base.kl_divergence() / N)
    torch.testing.assert_close(terms[2], likelihood.noise_prior.log_prob(likelihood.noise).sum() / N)
    total = AugmentedELBO(likelihood, model, num_data=N, beta=0.5)(q, y)
    torch.testing.assert_close(total, terms[0] - terms[1] + terms[2])


def test_tasks_are_summed():
    model = randomise(SparseGP(inputs(2, M, 2), num_tasks=2)).train()
    x, y = inputs(N, 2, seed=1), MEMBERS["student_t"].targets(N, 2)
    bound = AugmentedELBO(student_t(), model, num_data=N)(model(x), y)
    total = 0
    for task in range(2):
        q = model.base(x)[task]
        total = total + student_t().augmented_bound(y[:, task], q).sum() / N
    torch.testing.assert_close(bound, total - model.base.kl_divergence().sum() / N)


def test_a_likelihood_without_augmentation_is_refused_by_name():
    model = SparseGP(inputs(M, 2))
    with pytest.raises(TypeError, match=r"PoissonLikelihood.*VariationalELBO"):
        AugmentedELBO(gpytorch.likelihoods.PoissonLikelihood(), model, num_data=N)


def test_models_without_a_q_are_refused():
    class Latent(gpext.models.LatentGP):
        def forward(self, x):
            return MultivariateNormal(torch.zeros(len(x)), torch.eye(len(x)))

    x, y, likelihood = torch.zeros(3, 1), torch.zeros(3), StudentTLikelihood()
    latent = Latent(x, y, likelihood)
    for model in (latent, gpytorch.models.ExactGP(x, y, gpytorch.likelihoods.GaussianLikelihood())):
        with pytest.raises(TypeError, match=r"needs an ApproximateGP.*LatentMarginalLogLikelihood"):
            AugmentedELBO(likelihood, model, num_data=3)
    with pytest.raises(TypeError, match=r"no q\(u\) to train by VariationalELBO.*LatentMarginalLogLikelihood"):
        gpext.fit(gpytorch.mlls.VariationalELBO(likelihood, latent, num_data=3), x, y, progress=False)
    for other in (None, latent):
        with pytest.raises(TypeError, match=r"expected an objective of gpytorch or of gpext\.mlls"):
            gpext.fit(other, x, y, progress=False)
