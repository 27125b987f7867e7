"""Rules that turn current marginals into Gaussian sites, and their drivers."""

from gpext.inference.cavi import CAVI, require_augmentation
from gpext.inference.ep import EP
from gpext.inference.expansion import DenseBlocksWarning
from gpext.inference.kl import KL
from gpext.inference.laplace import Laplace
from gpext.inference.local_terms import (
    LikelihoodTerm,
    LocalTerms,
    augmented_sites,
    augmented_terms,
    exact_terms,
    likelihood_terms,
)
from gpext.inference.outliers import OutlierReport, outlier_report
from gpext.inference.result import InferenceResult, InferenceWarning, Status
from gpext.inference.robust_conjugate import RobustConjugate
from gpext.inference.rule import Rule
from gpext.inference.taylor import Taylor

__all__ = [
    "CAVI",
    "EP",
    "KL",
    "DenseBlocksWarning",
    "InferenceResult",
    "InferenceWarning",
    "Laplace",
    "LikelihoodTerm",
    "LocalTerms",
    "OutlierReport",
    "RobustConjugate",
    "Rule",
    "Status",
    "Taylor",
    "augmented_sites",
    "augmented_terms",
    "exact_terms",
    "likelihood_terms",
    "outlier_report",
    "require_augmentation",
]
