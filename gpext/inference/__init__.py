"""Rules that turn current marginals into Gaussian sites, and their drivers."""

from gpext.inference.cavi import CAVI, require_augmentation
from gpext.inference.kl import KL
from gpext.inference.local_terms import LocalTerms, augmented_sites, augmented_terms, exact_terms
from gpext.inference.result import InferenceResult, Status

__all__ = [
    "CAVI",
    "KL",
    "InferenceResult",
    "LocalTerms",
    "Status",
    "augmented_sites",
    "augmented_terms",
    "exact_terms",
    "require_augmentation",
]
