"""A comparison of inference rules on one model at its current parameters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpext.inference import CAVI, EP, KL, Laplace, Rule, Taylor
from gpext.inference.result import without_inference_warnings
from gpext.models.latent_gp import LatentGP, check_rule


@dataclass(frozen=True)
class ComparedRule:
    """One line of a comparison.

    Attributes:
        name: of the rule.
        log_evidence: its value for log p(y), summed over a batch; nan if it does not apply.
        log_loo: mean leave-one-out log density of a datum.
        seconds: of the inference, from a cold start.
        num_steps: Cholesky factorisations.
        status: how it ended, or why it does not apply.

    Example:
        >>> line = ComparedRule("Laplace", -12.3, -11.8, 0.2, 9, "converged")
        >>> line.log_loo > line.log_evidence
        True
    """

    name: str
    log_evidence: float
    log_loo: float
    seconds: float
    num_steps: int
    status: str


@dataclass(frozen=True)
class Comparison:
    """Several rules on one model; printing it shows the table.

    Example:
        >>> laplace = ComparedRule("Laplace", -12.0, -11.8, 0.2, 9, "converged")
        >>> ep = ComparedRule("EP", -11.9, -11.7, 0.4, 6, "converged")
        >>> max(Comparison((laplace, ep)).rules, key=lambda rule: rule.log_loo).name
        'EP'
    """

    rules: tuple[ComparedRule, ...]

    def __str__(self) -> str:
        lines = [f"{'rule':<24}{'log evidence':>14}{'LOO a datum':>13}{'seconds':>9}{'steps':>7}  status"]
        lines += [
            f"{row.name:<24}{row.log_evidence:>14.4f}{row.log_loo:>13.4f}{row.seconds:>9.3f}{row.num_steps:>7}  "
            f"{row.status}"
            for row in self.rules
        ]
        return "\n".join(lines)


@torch.inference_mode(False)
@torch.no_grad()
def compare_inference(model: LatentGP, rules: Sequence[Rule] | None = None) -> Comparison:
    """Run several rules on a model, each from a cold start, and return a table of results; the model does not change.

    Args:
        model: a LatentGP; its own rule and sites are restored afterwards.
        rules: KL(), EP(), Laplace(), CAVI() and Taylor() by default. Those that do not apply are named.

    Raises:
        TypeError: not a LatentGP, or not a rule.

    Example:
        >>> print(compare_inference(model))  # doctest: +SKIP
        rule                      log evidence  LOO a datum  seconds  steps  status
        KL(Quadrature)                -22.3714      -0.5121    0.004      5  CONVERGED
        Laplace                       -22.3102      -0.5140    0.002      4  CONVERGED
    """
    if not isinstance(model, LatentGP):
        raise TypeError(f"expected a gpext.models.LatentGP; got {type(model).__qualname__}.")
    rules = (KL(), EP(), Laplace(), CAVI(), Taylor()) if rules is None else rules
    for rule in rules:
        check_rule(rule)
    rows = []
    prior, targets = model.variational_strategy.prior_distribution, model.train_targets
    for rule in rules:
        started = time.perf_counter()
        try:
            with without_inference_warnings():  # the status states it
                result = rule.infer(prior, model.likelihood, targets)
        except (TypeError, ValueError) as error:  # a schedule or a bound may not support several latents, or a batch
            nan = float("nan")
            rows.append(ComparedRule(type(rule).__name__, nan, nan, nan, 0, str(error)))
            continue
        seconds = time.perf_counter() - started
        name, evidence, loo = (
            result.message.split(",")[0],
            result.log_evidence.sum().item(),
            result.log_loo.mean().item(),
        )
        rows.append(ComparedRule(name, evidence, loo, seconds, result.num_steps, result.status.name))
    return Comparison(tuple(rows))
