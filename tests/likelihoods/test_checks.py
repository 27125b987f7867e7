"""Checks of finite values name the first that is not finite."""

import pytest
import torch

from gpext.checks import check_finite, is_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_finite_values_are_finite_even_where_their_sum_is_not(dtype, requires_grad):
    values = torch.full((3, 4), torch.finfo(dtype).max, dtype=dtype, requires_grad=requires_grad)
    assert not bool(values.detach().sum().isfinite())
    assert is_finite(values)
    check_finite("inputs", values)
    assert is_finite(values[:0])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_is_named(value):
    values = torch.zeros(3, 4)
    values[1, 2] = value
    assert not is_finite(values)
    with pytest.raises(ValueError, match=rf"inputs must be finite; got {value} at index \(1, 2\)"):
        check_finite("inputs", values)


def test_infinities_of_both_signs_are_not_finite_together():
    assert not is_finite(torch.tensor([float("inf"), -float("inf")]))


def test_integers_are_finite():
    check_finite("targets", torch.arange(3))
