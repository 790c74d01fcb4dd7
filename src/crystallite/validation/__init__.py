"""The validation stage: original and reorganized system side by side, over data and over levels."""

from crystallite.validation.block_roles import BlockRoles, block_roles
from crystallite.validation.metrics import Metric
from crystallite.validation.rules import Rules
from crystallite.validation.run import validate
from crystallite.validation.sweep import Sweep, sweep
from crystallite.validation.verdict import Verdict

__all__ = ["BlockRoles", "Metric", "Rules", "Sweep", "Verdict", "block_roles", "sweep", "validate"]
