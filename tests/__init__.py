"""Tests, one folder a room of the package. Every process that imports one of them draws from the seeds of seeds.py."""

from tests import seeds

seeds.shift()
