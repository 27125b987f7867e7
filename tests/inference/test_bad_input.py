"""Bad input is rejected by every rule, for every likelihood."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

import gpext
from gpext.inference import CAVI, EP, KL, Laplace, Taylor
from gpext.likelihoods import (
    LaplaceLikelihood,
    MultinomialLogitLikelihood,
    OrdinalLogitLikelihood,
    OrdinalProbitLikelihood,
    PoissonLikelihood,
    StickBreakingLikelihood,
    StudentTLikelihood,
)
from tests.members import F64

N = 6


def prior(latents=None, size=N):
    batch = [] if latents is None else [latents]
    return MultivariateNormal(
        torch.zeros(*batch, size, dtype=F64), torch.eye(size, dtype=F64).expand(*batch, size, size)
    )


@pytest.mark.parametrize("rule", [KL(), EP(), Laplace()], ids=repr)
@pytest.mark.parametrize("likelihood", [OrdinalLogitLikelihood(3), OrdinalProbitLikelihood(3)])
@pytest.mark.parametrize("label", [-1.0, 1.5, 3.0, 1e8])
def test_labels_out_of_range(rule, likelihood, label):
    y = torch.ones(N, dtype=F64).index_fill(0, torch.tensor(4), label)
    with pytest.raises(
        ValueError, match=rf"classes 0, \.\.\., 2; got \{{{label:g}\}}.*first at index 4".replace("+", r"\+")
    ):
        rule.infer(prior(), likelihood.double(), y)


@pytest.mark.parametrize("likelihood", [MultinomialLogitLikelihood(3), StickBreakingLikelihood(4)])
def test_a_column_of_labels(likelihood):
    with pytest.raises(ValueError, match=r"like the prior; got \(6, 1\)"):
        KL().infer(prior(3), likelihood, torch.ones(N, 1, dtype=F64))


@pytest.mark.parametrize("rule", [KL(), EP(), Laplace()], ids=repr)
def test_no_data(rule):
    with pytest.raises(ValueError, match="at least one datum"):
        rule.infer(prior(size=0), StudentTLikelihood().double(), torch.zeros(0, dtype=F64))


@pytest.mark.parametrize("y", [[0.0] * N, torch.zeros(N).numpy()], ids=["list", "array"])
def test_targets_that_are_no_tensor(y):
    x = torch.linspace(0, 1, N)
    likelihood = StudentTLikelihood()
    for use in (
        lambda: KL().infer(prior(), likelihood, y),
        lambda: gpext.models.LatentGP(x, y, likelihood),
    ):
        with pytest.raises(TypeError, match=rf"targets must be a torch.Tensor; got {type(y).__name__}"):
            use()
    with pytest.raises(TypeError, match="expected a likelihood"):
        gpext.models.LatentGP(x, x, None)


@pytest.mark.parametrize("likelihood", [PoissonLikelihood(), OrdinalLogitLikelihood(2)])
def test_booleans_count(likelihood):
    y = torch.tensor([True, False] * 3)
    likelihood = likelihood.double().requires_grad_(False)
    of_booleans, of_numbers = (KL().infer(prior(), likelihood, t).log_evidence for t in (y, y.double()))
    torch.testing.assert_close(of_booleans, of_numbers)


def test_test_inputs_of_other_columns():
    class Model(gpext.models.LatentGP):
        def forward(self, x):
            return MultivariateNormal(torch.zeros(len(x)), gpytorch.kernels.RBFKernel()(x))

    model = Model(torch.rand(N, 2), torch.zeros(N), StudentTLikelihood()).eval()
    with pytest.raises(ValueError, match=r"expected inputs of 2 columns, \(..., N, 2\); got \(3, 1\)"):
        model(torch.zeros(3))


@pytest.mark.parametrize("rule", [CAVI, EP, KL, Laplace, Taylor])
@pytest.mark.parametrize("option", [{"jitter": -1e-6}, {"max_steps": -1}, {"tolerance": float("nan")}])
def test_options(rule, option):
    (name,) = option
    if rule is Taylor and name != "jitter":
        return
    with pytest.raises(ValueError, match=f"{name} must be finite and not negative"):
        rule(**option)
    with pytest.raises(ValueError, match="schedule must be"):
        KL(schedule="both")


@pytest.mark.parametrize(
    ("rule", "likelihood", "others"),
    [
        (CAVI(), PoissonLikelihood(), ["KL()", "EP()", "Laplace()"]),
        (CAVI(), StickBreakingLikelihood(3), ["KL()"]),
        (EP(), StickBreakingLikelihood(3), ["KL()"]),
        (Laplace(), LaplaceLikelihood(), ["CAVI()", "KL()", "EP()"]),
        (Laplace(), gpytorch.likelihoods.LaplaceLikelihood(), ["KL()", "EP()"]),
    ],
)
def test_a_rule_that_does_not_apply_names_those_that_do(rule, likelihood, others):
    y = torch.zeros(N, dtype=F64)
    with pytest.raises(TypeError, match=r"gpext\.inference") as error:
        rule.infer(prior(getattr(likelihood, "num_latents", None)), likelihood.double(), y)
    said = str(error.value).split("gpext.inference")[-1]
    assert [name for name in ("CAVI()", "KL()", "EP()", "Laplace()") if name in said] == others
    for name in others:
        getattr(gpext.inference, name[:-2])().infer(
            prior(getattr(likelihood, "num_latents", None)), likelihood.double(), y
        )


def test_columns_and_one_hot_rows_are_told_what_to_do():
    with pytest.raises(ValueError, match=r"got \(6, 1\)\. Take targets\.squeeze\(-1\)"):
        KL().infer(prior(), StudentTLikelihood().double(), torch.zeros(N, 1, dtype=F64))
    rows = torch.eye(3, dtype=torch.long).repeat(2, 1)
    with pytest.raises(ValueError, match=r"got \(6, 3\).*targets\.argmax\(-1\)"):
        Laplace().infer(prior(3), MultinomialLogitLikelihood(3), rows)
    with pytest.raises(TypeError, match=r"expected an InferenceResult, such as model\.result; got str"):
        gpext.inference.outlier_report("result")
