"""Tests, one folder per subpackage. Every process that imports one of them draws from the seeds of seeds.py."""

from tests import seeds

seeds.shift()
