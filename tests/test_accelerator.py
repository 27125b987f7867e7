"""The simulated device rejects what a GPU rejects, and has the results of the CPU."""

import pytest
import torch

from tests.accelerator import DEVICE, IS_REAL, accelerated, sent

pytestmark = pytest.mark.skipif(IS_REAL, reason="has a GPU")


@pytest.fixture(autouse=True)
def _there():
    with accelerated():
        yield


def test_numbers_and_derivatives_are_those_of_the_cpu():
    x = torch.randn(4, 3)
    A = x @ x.mT + torch.eye(4)
    there = torch.nn.Parameter(sent(A))
    torch.linalg.cholesky(there).diagonal().log().sum().backward()
    torch.testing.assert_close(2 * there.grad.cpu(), torch.linalg.inv(A), rtol=1e-4, atol=1e-4)
    assert there.grad.device == torch.tensor([1.0, 2.0], device=DEVICE).device == DEVICE
    assert torch.tensor([1.0, 2.0], device=DEVICE).tolist() == there.new_tensor([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert float(sent(A)[0, 0]) == float(A[0, 0])


@pytest.mark.parametrize(
    "operation",
    [
        lambda there, here: there + here,
        lambda there, here: here @ there,
        lambda there, here: torch.where(here > 0, there, 0.0),
        lambda there, here: here[there > 0],
        lambda there, here: torch.cat([there, here]),
        lambda there, here: torch.linalg.solve_triangular(there, here, upper=True),
    ],
)
def test_devices_do_not_mix(operation):
    here = torch.rand(3, 3)
    with pytest.raises(RuntimeError, match="on one device"):
        operation(sent(here), here)


def test_numbers_indices_and_copies_may():
    here = torch.arange(3.0)
    there = sent(here)
    assert (there + torch.tensor(1.0)).device == DEVICE
    assert there[torch.tensor([2, 0])].tolist() == [2.0, 0.0]
    assert here.copy_(2 * there).tolist() == [0.0, 2.0, 4.0]


def test_generators_belong_to_a_device():
    assert torch.Generator(DEVICE).device == DEVICE
    assert torch.Generator().device == torch.device("cpu")
    for device, owner in ((DEVICE, torch.Generator()), ("cpu", torch.Generator(DEVICE))):
        with pytest.raises(RuntimeError, match="generator"):
            torch.randn(3, device=device, generator=owner)
    assert torch.randn(3, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).device == DEVICE


def test_numpy_is_refused():
    with pytest.raises(TypeError, match="numpy"):
        sent(torch.ones(2)).numpy()
    assert sent(torch.ones(2)).cpu().numpy().sum() == 2
