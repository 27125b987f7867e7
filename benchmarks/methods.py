"""The registry of methods that the benchmarks compare; gpext's own entry is called ``gpext``."""

from benchmarks.harness import Method
from benchmarks.ours import OURS
from benchmarks.peers import PEERS

METHODS: dict[str, Method] = {**OURS, **PEERS}
