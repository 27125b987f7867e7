"""Training: `fit(mll, x, y)`, and `fit_grid(mll, x, y)`, which integrates over one hyperparameter.

What `fit` does follows from the objective, the model and `batch_size`:

* AugmentedELBO, or VariationalELBO and a likelihood of gpext, with a SiteVariationalStrategy. Without `batch_size`:
  q(u) of many data at the hyperparameters given, then L-BFGS on the collapsed bound of growing subsets of the data, up
  to all of them. With it: L-BFGS on the collapsed bound of growing subsets of a sample; then minibatches, closed-form
  steps in q(u), Adam for the hyperparameters every few steps, with step sizes that fall. Around the strategy may be
  gpytorch's IndependentMultitaskVariationalStrategy, or, under a VariationalELBO, an LMCVariationalStrategy; a `design`
  makes the data depend on linear functions of f.
* LatentMarginalLogLikelihood of a LatentGP with neighbours. Without `batch_size`: as any other. With it: blocks of near
  data, Adam, one block of each rank a step, with step sizes that fall.
* Any other gpytorch objective. Without `batch_size`: L-BFGS on the full batch; of a LatentGP, with `initial="subset"`,
  on a quarter and a half of the data first, or, with `initial="curvature"`, by the second derivatives of a quarter.
  With it: minibatches, Adam, and NGD where q(u) has natural parameters.

A SiteVariationalStrategy counts as any other if its model maps an input otherwise in another batch (as
BatchNorm, Dropout or ScaleToBounds in a feature extractor do): sites belong to one prior, and such a model has
a different one for each batch.
"""

from gpext.training.fitting import fit
from gpext.training.grid import GridFit, fit_grid
from gpext.training.initial_values import initialise_from_data
from gpext.training.result import FitResult, FitStatus

__all__ = ["FitResult", "FitStatus", "GridFit", "fit", "fit_grid", "initialise_from_data"]
