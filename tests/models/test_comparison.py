"""The table of all rules on one model, against the rules run one by one."""

import copy

import pytest
import torch

from gpext.inference import CAVI, KL, Laplace
from gpext.likelihoods import LaplaceLikelihood
from gpext.models import compare_inference
from tests.models.test_latent_gp import Model, data, made


def test_runs_every_rule_and_leaves_the_model_alone():
    model, _, _, _ = made(Laplace())
    before = copy.deepcopy(model.state_dict())
    comparison = compare_inference(model)
    assert [row.name for row in comparison.rules] == ["KL(Quadrature)", "EP(power=1)", "Laplace", "CAVI", "Taylor"]
    assert all(row.status == "CONVERGED" for row in comparison.rules)
    kl, cavi = comparison.rules[0], comparison.rules[2]
    assert kl.log_evidence > cavi.log_evidence
    assert (
        kl.log_evidence == KL().infer(model(model.train_inputs[0]), model.likelihood, model.train_targets).log_evidence
    )
    assert isinstance(model.inference, Laplace)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "log evidence" in str(comparison)
    assert len(str(comparison).splitlines()) == 6


def test_a_rule_that_does_not_apply_says_so():
    x, y = data()
    model = Model(x, y, LaplaceLikelihood()).double()
    comparison = compare_inference(model, [CAVI(), Laplace()])
    assert comparison.rules[0].status == "CONVERGED"
    assert "second derivative" in comparison.rules[1].status


def test_a_schedule_that_does_not_serve_a_batch_says_so():
    x, y = data()
    model = Model(x, torch.stack([y, -y]), LaplaceLikelihood()).double()
    comparison = compare_inference(model, [KL(schedule="sequential"), KL()])
    assert "schedule='parallel'" in comparison.rules[0].status
    assert comparison.rules[1].status == "CONVERGED"


def test_in_inference_mode_too():
    model, _, _, _ = made()
    expected = [row.log_evidence for row in compare_inference(model).rules]
    with torch.inference_mode():
        assert [row.log_evidence for row in compare_inference(model).rules] == expected


def test_other_models_and_rules_are_refused():
    with pytest.raises(TypeError, match=r"expected a gpext\.models\.LatentGP; got Linear"):
        compare_inference(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="inference must be an instance of a rule"):
        compare_inference(made(Laplace())[0], [KL])
