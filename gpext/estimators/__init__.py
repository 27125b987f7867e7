"""Estimators for scikit-learn: tables in, calibrated predictions out, every choice made for the user and reported.

GPClassifier          two or many classes
GPOrdinalClassifier   ordered classes
GPRegressor           numbers, with Gaussian, heavy-tailed or input-dependent noise
GPCountRegressor      counts, with exposures
GPSurvival            survival times, some censored
"""

from gpext.estimators.classifier import GPClassifier
from gpext.estimators.count_regressor import GPCountRegressor
from gpext.estimators.ordinal_classifier import GPOrdinalClassifier
from gpext.estimators.regressor import GPRegressor
from gpext.estimators.report import Report
from gpext.estimators.survival import GPSurvival

__all__ = ["GPClassifier", "GPCountRegressor", "GPOrdinalClassifier", "GPRegressor", "GPSurvival", "Report"]
