"""Draw the figure of the landing page: one sine with outliers, under Gaussian and under Student-t noise."""

from pathlib import Path

import gpytorch
import matplotlib.pyplot as plt
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean

import gpext
from gpext.mlls import LatentMarginalLogLikelihood

_STYLES = {"light": ("#222222", "#00599a", "#b34a00"), "dark": ("#e0e0e0", "#6cb6f0", "#ffa057")}


class Model(gpext.models.LatentGP):
    """A constant mean, a squared exponential kernel."""

    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = ConstantMean()
        self.covar_module = ScaleKernel(RBFKernel())

    def forward(self, x):
        """The prior of f at x."""
        prior = self.mean_module(x), self.covar_module(x)
        return MultivariateNormal(*prior)


def predicted(x, y, likelihood, at):
    """The posterior of f at new inputs."""
    model = Model(x, y, likelihood).double()
    mll = LatentMarginalLogLikelihood(likelihood, model)
    gpext.fit(mll, x, y, progress=False)
    with torch.no_grad():
        return model.eval()(at)


def draw(folder: Path) -> None:
    """Write landing-light.svg and landing-dark.svg, each with two panels, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 6, 60).double()
    y = torch.sin(x) + 0.1 * torch.randn(60, generator=generator).double()
    y[5::9] += 1 + 1.5 * torch.rand(7, generator=generator).double()
    likelihoods = [gpytorch.likelihoods.GaussianLikelihood(), gpext.likelihoods.StudentTLikelihood()]
    at = torch.linspace(0, 6, 200).double()
    fits = [predicted(x, y, each.double(), at) for each in likelihoods]
    for name, (text, blue, orange) in _STYLES.items():
        colors = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), text)
        with plt.rc_context(colors | {"svg.hashsalt": "gpext", "svg.fonttype": "none"}):
            figure, panels = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True, layout="constrained")
            for ax, title, f in zip(panels, ("GaussianLikelihood", "StudentTLikelihood"), fits, strict=True):
                width = 1.645 * f.stddev
                ax.fill_between(at, f.mean - width, f.mean + width, color=blue, alpha=0.3, lw=0)
                ax.plot(at, f.mean, color=blue)
                ax.plot(at, torch.sin(at), "--", color=orange, lw=1)
                ax.plot(x, y, ".", color=text, ms=4)
                ax.set(title=title, xlabel="x")
            figure.savefig(folder / f"landing-{name}.svg", transparent=True, metadata={"Date": None})
            plt.close(figure)
