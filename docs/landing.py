"""Draw the figure of the landing page: one sine with outliers, under Gaussian and under Student-t noise."""

from pathlib import Path

import gpytorch
import matplotlib.pyplot as plt
import torch

import gpext

_STYLES = {"light": ("#222222", "#00599a", "#b34a00"), "dark": ("#e0e0e0", "#6cb6f0", "#ffa057")}


class _Model(gpext.models.LatentGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def _trained(x, y, likelihood):
    model = _Model(x, y, likelihood.double()).double()
    gpext.fit(gpext.mlls.LatentMarginalLogLikelihood(likelihood, model), x, y, progress=False)
    at = torch.linspace(0, 6, 200).double()
    with torch.no_grad():
        f = model.eval()(at)
    return at, f.mean, 1.645 * f.stddev


def draw(folder: Path) -> None:
    """Write landing-light.svg and landing-dark.svg, each with two panels, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 6, 60).double()
    y = torch.sin(x) + 0.1 * torch.randn(60, generator=generator).double()
    y[5::9] += 1 + 1.5 * torch.rand(7, generator=generator).double()
    likelihoods = [gpytorch.likelihoods.GaussianLikelihood(), gpext.likelihoods.StudentTLikelihood()]
    fits = [_trained(x, y, each) for each in likelihoods]
    for name, (text, blue, orange) in _STYLES.items():
        colors = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), text)
        with plt.rc_context(colors | {"svg.hashsalt": "gpext", "svg.fonttype": "none"}):
            figure, panels = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True, layout="constrained")
            for ax, title, (at, mean, width) in zip(
                panels, ("GaussianLikelihood", "StudentTLikelihood"), fits, strict=True
            ):
                ax.fill_between(at, mean - width, mean + width, color=blue, alpha=0.3, lw=0)
                ax.plot(at, mean, color=blue)
                ax.plot(at, torch.sin(at), "--", color=orange, lw=1)
                ax.plot(x, y, ".", color=text, ms=4)
                ax.set(title=title, xlabel="x")
            figure.savefig(folder / f"landing-{name}.svg", transparent=True, metadata={"Date": None})
            plt.close(figure)
