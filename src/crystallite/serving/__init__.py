"""Models as services: a transform tier in front of an inference tier, in process or over the network."""

from crystallite.serving.engine import Engine
from crystallite.serving.limits import Limits
from crystallite.serving.listening import Listener
from crystallite.serving.live_trial import TrialOptions
from crystallite.serving.machine import Machine
from crystallite.serving.plan import Plan, plan
from crystallite.serving.ray_engine import Scaling
from crystallite.serving.ray_service import RayService
from crystallite.serving.refusal import Refusal
from crystallite.serving.service import Service

__all__ = [
    "Engine", "Limits", "Listener", "Machine", "Plan", "RayService", "Refusal", "Scaling", "Service",
    "TrialOptions", "plan",
]  # fmt: skip
