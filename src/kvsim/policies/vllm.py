"""vLLM: first come first served, recompute on preemption (spec/vllm.md)."""

from __future__ import annotations

from typing import ClassVar

from kvsim.config import EngineConfig
from kvsim.policies.base import Directive, Policy, register_policy

__all__ = ["VllmPolicy"]


@register_policy
class VllmPolicy(Policy):
    """The default scheduler of vLLM.

    The whole known sequence of the queue head must fit before it enters; when a
    running request cannot grow, another is preempted and computed again later.
    """

    name: ClassVar[str] = "vllm"

    def directive(self, config: EngineConfig) -> Directive:
        """Switches of vLLM under the rule set of `config`."""
        rules = config.rules
        return Directive(
            oldest_victim=config.preemption_mode == "fifo",
            recompute_last_token=rules.recompute_last_token,
            giveback_blocks=1 if config.aic_nextn is not None else 0,
            always_draft=rules.always_draft,
            # On a decode worker prefill is free, so the first token is paid as a decode.
            first_token_is_decode=rules.first_token_is_decode or config.worker_type == "decode",
        )
