"""TensorRT-LLM: capacity policy GUARANTEED_NO_EVICT (spec/vllm.md section 11)."""

from __future__ import annotations

from typing import ClassVar

from kvsim.config import EngineConfig
from kvsim.policies.base import Directive, Policy, register_policy

__all__ = ["TrtllmPolicy"]


@register_policy
class TrtllmPolicy(Policy):
    """The no-evict scheduler of TensorRT-LLM: what is admitted runs to its end.

    Admission reserves prompt and outputs, outputs are cut at submit to what can
    ever be reserved, and nothing is preempted.
    """

    name: ClassVar[str] = "trtllm"

    def directive(self, config: EngineConfig) -> Directive:
        """Switches of TensorRT-LLM under the rule set of `config`."""
        rules = config.rules
        return Directive(
            reserve_to_completion=True,
            may_preempt=False,
            recompute_last_token=False,
            always_draft=True,
            first_token_is_decode=(
                rules.first_token_is_decode or config.worker_type == "decode" or config.aic_nextn is not None
            ),
            limit_model_len=rules.model_len_limits_trtllm,
        )
