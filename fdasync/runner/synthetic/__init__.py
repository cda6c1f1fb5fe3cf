"""A runner without a model, whose answers have a closed form (`oracle.py`): for tests and benchmarks."""

from fdasync.runner.synthetic.oracle import SyntheticConfig as SyntheticConfig
from fdasync.runner.synthetic.runner import WEIGHTS_FILE as WEIGHTS_FILE
from fdasync.runner.synthetic.runner import SyntheticRunner as SyntheticRunner
