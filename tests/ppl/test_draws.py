"""The reference sampler against a posterior in closed form, and the object it returns."""

import gpytorch
import pyro
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from pyro import distributions as dist
from pyro.infer import NUTS

from gpext import ppl
from gpext.inference import InferenceWarning
from tests.members import F64, tensor
from tests.statistics import block_means, misfit

Y = tensor(0.3, -1.0, 2.0)
K = 0.5 * torch.eye(3, dtype=F64) + 0.8


def gaussian_model(noise=0.4):
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double().requires_grad_(False)
    likelihood.noise = noise
    return ppl.latent_model(MultivariateNormal(torch.ones(3, dtype=F64), K), likelihood, Y)


@pytest.mark.slow
def test_nuts_on_the_whitened_latent_samples_the_posterior():
    generator = torch.Generator().manual_seed(0)
    draws = ppl.sample_posterior(
        NUTS(gaussian_model()), num_samples=200, warmup=60, num_chains=2, generator=generator, progress=False
    )
    f = draws.samples["f"]
    assert f.shape == draws.samples["f_whitened"].shape == (2, 200, 3)
    gain = K @ torch.linalg.inv(K + 0.4 * torch.eye(3, dtype=F64))
    mean, covariance = 1 + gain @ (Y - 1), K - gain @ K
    moments = torch.cat([f, (f - mean).square()], -1)
    assert misfit(block_means(moments, 20), torch.cat([mean, covariance.diagonal()])) < 1
    assert len(draws.diagnostics) == 2
    assert draws.diagnostics[0]["divergences"] == []


def test_independent_draws_are_worth_their_number():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 500, 2, generator=generator, dtype=F64)
    draws = ppl.PosteriorDraws({"x": x}, [])
    assert bool(((draws.effective_sample_size("x") / 2000 - 1).abs() < 0.25).all())
    torch.testing.assert_close(draws.standard_error("x"), 1 / draws.effective_sample_size("x").sqrt(), rtol=0.1, atol=0)
    with pytest.raises(ValueError, match="no site named 'g'; the program has 'x'"):
        draws.standard_error("g")


def test_sites_are_in_constrained_space_with_what_the_program_computes():
    def program():
        scale = pyro.sample("scale", dist.Gamma(2.0, 2.0))
        pyro.deterministic("twice", 2 * scale)
        f = ppl.latent_gp("f", MultivariateNormal(torch.zeros(2), scale * torch.eye(2)))
        pyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=torch.ones(2))

    generator = torch.Generator().manual_seed(0)
    samples = ppl.sample_posterior(NUTS(program), num_samples=4, warmup=4, generator=generator).samples
    assert set(samples) == {"scale", "twice", "f", "f_whitened"}
    assert bool((samples["scale"] > 0).all())
    torch.testing.assert_close(samples["twice"], 2 * samples["scale"])
    torch.testing.assert_close(samples["f"], samples["scale"].sqrt().unsqueeze(-1) * samples["f_whitened"])


@pytest.mark.parametrize("sizes", [{"num_samples": 0}, {"num_samples": 5, "num_chains": 0}])
def test_no_draws_are_refused(sizes):
    with pytest.raises(ValueError, match="at least one draw and one chain"):
        ppl.sample_posterior(NUTS(gaussian_model()), warmup=1, **sizes)


def test_a_program_is_no_kernel_and_a_warmup_not_negative():
    with pytest.raises(TypeError, match=r"such as NUTS\(model\); got partial"):
        ppl.sample_posterior(gaussian_model(), num_samples=2, warmup=1)
    with pytest.raises(ValueError, match="warmup must not be negative; got -1"):
        ppl.sample_posterior(NUTS(gaussian_model()), num_samples=2, warmup=-1)


def exact(joint, noise=0.4):
    """Mean and variance of the last values given y of the first three, in closed form."""
    covariance = joint.covariance_matrix
    gain = torch.linalg.solve(covariance[:3, :3] + noise * torch.eye(3, dtype=F64), covariance[:3, 3:]).mT
    mean = joint.mean[3:] + gain @ (Y - joint.mean[:3])
    return mean, (covariance[3:, 3:] - gain @ covariance[:3, 3:]).diagonal()


def test_predictions_at_new_inputs_agree_with_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(5, 6, generator=generator, dtype=F64)
    covariance = root @ root.mT / 6 + 0.3 * torch.eye(5, dtype=F64)
    joint = MultivariateNormal(tensor(1.0, 1.0, 1.0, 0.5, -0.5), covariance)
    prior = MultivariateNormal(joint.mean[:3], covariance[:3, :3])
    posterior_gain = covariance[:3, :3] @ torch.linalg.inv(covariance[:3, :3] + 0.4 * torch.eye(3, dtype=F64))
    mean = prior.mean + posterior_gain @ (Y - prior.mean)
    spread = torch.linalg.cholesky(covariance[:3, :3] - posterior_gain @ covariance[:3, :3])
    f = mean + torch.randn(2, 4000, 3, generator=generator, dtype=F64) @ spread.mT  # draws that are independent
    draws = ppl.PosteriorDraws({"f": f, "scale": torch.ones(2, 4000, dtype=F64)}, [])
    found = draws.predict("f", joint, num_draws=8000)
    mean, variance = exact(joint)
    between = found.components.mean.var(0)  # the Monte Carlo part: means of Gaussians whose means are drawn
    assert bool(((found.mean - mean).abs() < 4.5 * (between / 8000).sqrt()).all())
    assert bool(((found.variance - variance).abs() < 4.5 * between * (2 / 8000) ** 0.5).all())

    def of_sites(sites):
        assert sites["scale"].shape == ()
        return MultivariateNormal(joint.mean, sites["scale"] * covariance)

    again, few = draws.predict("f", of_sites, num_draws=40), draws.predict("f", joint, num_draws=40)
    torch.testing.assert_close(again.mean, few.mean)
    torch.testing.assert_close(again.variance, few.variance)


def test_predictions_that_cannot_be_made_say_why():
    draws = ppl.PosteriorDraws({"f": torch.zeros(1, 4, 3, dtype=F64)}, [])
    prior = MultivariateNormal(torch.zeros(3, dtype=F64), K)
    with pytest.raises(ValueError, match="the 3 values of 'f' and of new ones, in this order; got one of 3"):
        draws.predict("f", prior)
    with pytest.raises(ValueError, match="no site named 'g'"):
        draws.predict("g", prior)
    with pytest.raises(ValueError, match="num_draws must be at least 1; got 0"):
        draws.predict("f", prior, num_draws=0)
    with pytest.raises(TypeError, match="a MultivariateNormal; got Tensor"):
        draws.predict("f", lambda sites: K)


def test_draws_for_arviz_a_summary_and_a_short_repr():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 50, 3, generator=generator, dtype=F64)
    draws = ppl.PosteriorDraws({"x": x, "fixed": torch.ones(2, 50)}, [], "as it went.")
    posterior = draws.to_arviz().posterior
    assert torch.equal(torch.as_tensor(posterior["x"].values), x)
    assert set(posterior.data_vars) == {"x", "fixed"}
    said, head, *rows = draws.summary().splitlines()
    assert said == "as it went."
    assert head.split() == ["site", "shape", "mean", "sd", "least", "ESS", "R-hat"]
    assert [row.split()[0] for row in rows] == ["x", "fixed"]
    assert rows[0].split()[-2] == f"{float(draws.effective_sample_size('x').min()):.1f}"
    assert rows[1].split()[-2] == "nan"
    assert repr(draws) == "PosteriorDraws(message='as it went.')"


class Creeping(NUTS):
    """A kernel that hardly moves."""

    def sample(self, params):
        moved = super().sample(params)
        return {name: value + 0.01 * (moved[name] - value) for name, value in params.items()}


def test_draws_that_are_worth_few_are_told():
    def drawn(kernel, **options):
        generator = torch.Generator().manual_seed(0)
        return ppl.sample_posterior(kernel(gaussian_model()), generator=generator, progress=False, **options)

    with pytest.warns(InferenceWarning, match=r"least effective sample size .*, of 'f.*Draw more"):
        found = drawn(Creeping, num_samples=40, warmup=2)
    assert found.message.startswith("Creeping, 1 chain of 40 draws in ")
    assert drawn(NUTS, num_samples=40, warmup=20).message.startswith("NUTS, 1 chain of 40 draws in ")
