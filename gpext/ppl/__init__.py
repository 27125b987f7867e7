"""Pyro: latent Gaussian processes as sample sites, any likelihood as a factor, and kernels for `pyro.infer.MCMC`.

    f = latent_gp("f", prior)                       f = mu + L v,  v ~ N(0, I)
    observe("y", likelihood, f, targets)            p(y | f)

A program of these two and of anything else Pyro has is sampled by `pyro.infer.NUTS`, the reference, by `GibbsKernel`,
which draws f in closed form, or by `SGLDKernel`, Langevin steps. `gpext` imports this package when it is first named.
"""

from gpext.ppl.draws import PosteriorDraws, sample_posterior
from gpext.ppl.gibbs_kernel import GibbsKernel
from gpext.ppl.latent import latent_gp, latent_model
from gpext.ppl.observe import observe
from gpext.ppl.sgld_kernel import SGLDKernel

__all__ = ["GibbsKernel", "PosteriorDraws", "SGLDKernel", "latent_gp", "latent_model", "observe", "sample_posterior"]
