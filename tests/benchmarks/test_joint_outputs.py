"""The joint model of four outputs beside separate ones."""

import pytest
import torch

from benchmarks import joint_outputs
from benchmarks.ledger import Ledger
from gpext.inference import KL

# linear_operator builds sparse matrices for the IndexKernel, of which torch warns once.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def test_data_have_every_output_and_the_measurement_at_the_end():
    data = joint_outputs.draw(0)
    assert len(data.y) + len(data.missing_y) == 4 * joint_outputs.PLACES
    late = data.missing_x[:, 0] > 7.5
    assert bool((data.missing_x[late, 1] != joint_outputs.MEASUREMENT).all())
    assert data.x[:, 1].unique().tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_both_models_score_every_output_and_the_report_has_both():
    data, ledger = joint_outputs.draw(1), Ledger(None)
    for name, function in (("joint", joint_outputs.jointly), ("separate", joint_outputs.separately)):
        row = ledger.get(f"KL/{name}/1", lambda f=function: f(data, KL()))
        assert all(torch.tensor(row[output]).isfinite() for output in joint_outputs.OUTPUTS)
    assert "| KL | joint |" in joint_outputs.report(ledger)
