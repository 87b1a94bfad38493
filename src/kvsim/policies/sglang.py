"""SGLang: prefill first, optimistic admission, retraction (spec/sglang.md)."""

from __future__ import annotations

from typing import ClassVar

from kvsim.config import EngineConfig
from kvsim.policies.base import Directive, Policy, register_policy

__all__ = ["SglangPolicy"]

# Constants of spec/sglang.md section 1.4.
_INIT_RATIO = 0.7
_MIN_SHARE = 0.14
_DECAY_PASSES = 600


@register_policy
class SglangPolicy(Policy):
    """The scheduler of SGLang.

    Prompts go before decodes. Admission bets that running requests will need
    only a share of the outputs they may produce, the new-token ratio, which
    shrinks while the bet holds; when it fails, requests with the fewest outputs
    are retracted and computed again.
    """

    name: ClassVar[str] = "sglang"

    def directive(self, config: EngineConfig) -> Directive:
        """Queue order and new-token ratio of `config.sglang`."""
        first = _INIT_RATIO * config.sglang.schedule_conservativeness
        least = first * _MIN_SHARE
        return Directive(
            longest_prefix_first=config.sglang.schedule_policy == "lpm",
            init_new_token_ratio=first,
            min_new_token_ratio=least,
            new_token_ratio_decay=(first - least) / _DECAY_PASSES,
        )
