"""Versioned rule sets: which generation of an engine's scheduler is simulated.

A rule set is data. Kernels and policies read its switches; nothing else in
the package asks for a rule set by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsim.errors import ConfigError

__all__ = ["RULESETS", "Ruleset", "get_ruleset"]


@dataclass(frozen=True, slots=True)
class Ruleset:
    """Named switches of one scheduler generation (spec/vllm.md section 15).

    Attributes
    ----------
    name : str
        The name users write, with the version of the engine it pins.
    eager_sample_blocks : bool
        The block of a sampled token is taken when the token is emitted; else
        when the next pass schedules it, so that a terminal sample takes none.
    recompute_last_token : bool
        A fully cached sequence recomputes its last block to obtain logits.
    kv_events_at_pass_start : bool
        Paged engines show the KV events of a pass at its start; else at its end.
    first_token_is_decode : bool
        A request that gets its first token in the pass that completes its
        prompt counts in the decode duration of that pass.
    decode_time_from_blocks : bool
        Decode timing sees ``active_blocks * block_size`` instead of the summed
        lengths of the decoding requests.
    floor_decode_of_every_model : bool
        The 1 ms floor of a decode pass applies to every timing model; else to
        the polynomial only.
    always_draft : bool
        Speculation bursts in every pass with ``aic_nextn`` drafts that cost no
        token budget; else drafts are left by an emission and are scheduled.
    model_len_limits_trtllm : bool
        ``max_model_len`` applies to TensorRT-LLM too.
    trtllm_destinations : bool
        TensorRT-LLM decode workers accept handoff destinations.
    activation_keeps_arrival_order : bool
        An activated destination waits at its original place; else at the end.
    mixed_radix_passes : bool
        SGLang's prompts and running requests share a pass, over a pool of single
        tokens, with all else that belongs to that generation (spec/sglang.md
        section 13); else a pass is prefill or decode.
    """

    name: str
    eager_sample_blocks: bool
    recompute_last_token: bool
    kv_events_at_pass_start: bool
    first_token_is_decode: bool
    decode_time_from_blocks: bool
    floor_decode_of_every_model: bool
    always_draft: bool
    model_len_limits_trtllm: bool
    trtllm_destinations: bool
    activation_keeps_arrival_order: bool
    mixed_radix_passes: bool


_NEWEST = Ruleset(
    name="dynamo",
    eager_sample_blocks=False,
    recompute_last_token=True,
    kv_events_at_pass_start=False,
    first_token_is_decode=False,
    decode_time_from_blocks=False,
    floor_decode_of_every_model=False,
    always_draft=False,
    model_len_limits_trtllm=True,
    trtllm_destinations=True,
    activation_keeps_arrival_order=True,
    mixed_radix_passes=False,
)
_DYNAMO_1_3 = Ruleset(
    name="dynamo-1.3",
    eager_sample_blocks=True,
    recompute_last_token=False,
    kv_events_at_pass_start=True,
    first_token_is_decode=True,
    decode_time_from_blocks=True,
    floor_decode_of_every_model=True,
    always_draft=True,
    model_len_limits_trtllm=False,
    trtllm_destinations=False,
    activation_keeps_arrival_order=False,
    mixed_radix_passes=True,
)

RULESETS: dict[str, Ruleset] = {rules.name: rules for rules in (_NEWEST, _DYNAMO_1_3)}


def get_ruleset(name: str) -> Ruleset:
    """Rule set called `name`.

    Raises
    ------
    ConfigError
        If there is none of that name; the message lists those there are.
    """
    try:
        return RULESETS[name]
    except (KeyError, TypeError):
        allowed = ", ".join(sorted(RULESETS))
        raise ConfigError("ruleset", f"must be one of {allowed}, got {name!r}") from None
