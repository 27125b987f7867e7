"""GPBoost's side of the benchmarks beside it, in a process of its own: numpy and gpboost are all it imports.

    python benchmarks/gpboost_peer.py DATA.npz RESULT.npz LIKELIHOOD APPROXIMATION CPU_SECONDS [latent]

DATA has x, y and x_test; RESULT gets the latent predictive means and variances, those of the response unless `latent`
says that the others are enough, the parameters and the CPU and wall seconds of training and prediction; a run of more
than CPU_SECONDS ends without. The model is a Matern-3/2
field with a constant mean at GPBoost's default options, on one thread.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import numpy as np


def _clocks() -> Any:
    return np.array([time.process_time(), time.perf_counter()])


def measure(x: Any, y: Any, x_test: Any, likelihood: str, approximation: str, *, of_response: bool) -> dict[str, Any]:
    """Return predictions, parameters and times of a model trained on x (n, 2) and y (n,)."""
    import gpboost

    model = gpboost.GPModel(
        gp_coords=x,
        cov_function="matern",
        cov_fct_shape=1.5,
        likelihood=likelihood,
        gp_approx=approximation,
        num_parallel_threads=1,
    )
    started = _clocks()
    model.fit(y=y, X=np.ones((len(x), 1)))
    train = _clocks() - started
    at = {"gp_coords_pred": x_test, "X_pred": np.ones((len(x_test), 1)), "predict_var": True}
    started = _clocks()
    latent = model.predict(**at, predict_response=False)
    predict = _clocks() - started
    found = {
        "mean": latent["mu"],
        "variance": latent["var"],
        "seconds": np.array([train[0], predict[0]]),
        "wall": np.array([train[1], predict[1]]),
        "covariance": np.asarray(model.get_cov_pars()).ravel(),
        "version": np.array(gpboost.__version__),
    }
    if of_response:
        response = model.predict(**at, predict_response=True)
        found.update(response_mean=response["mu"], response_variance=response["var"])
    auxiliary = model.get_aux_pars()
    if auxiliary is not None:
        for name in auxiliary.columns:
            found[f"parameter_{name}"] = np.array(float(auxiliary[name].iloc[0]))
    return found


def main(arguments: list[str]) -> int:
    """Measure and write; the message of a failure goes to the standard error."""
    data, result, likelihood, approximation, longest, *extent = arguments
    resource.setrlimit(resource.RLIMIT_CPU, (int(longest), int(longest)))
    with np.load(data) as given:
        x, y, x_test = (given[name] for name in ("x", "y", "x_test"))
        found = measure(x, y, x_test, likelihood, approximation, of_response="latent" not in extent)
    np.savez(result, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
