"""One rank with lower tiers and its clock, for the kernel and for the twin alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.config import EngineConfig, FixedTiming, KvbmTiers
from kvsim.contract import (
    CancelDestination,
    Command,
    CommandContext,
    CommandEffects,
    InternalEffects,
    KvEvent,
    RankIdentity,
    RankPass,
    Request,
    ReserveDestination,
    Submit,
)
from kvsim.rank import SchedulerRank
from model.paged import PagedModel
from support import rank_state

FACES = {"twin": PagedModel, "kernel": SchedulerRank}
#: bytes of a token where a block of 4 is 1 MB
MEGABYTE_BLOCKS = 250_000


class Bench:
    """A rank whose passes take no time unless said otherwise; blocks of 4 tokens and 1 MB.

    `tiers` are fields of `KvbmTiers`; links are instantaneous by default.
    """

    def __init__(self, face: str, tiers: dict[str, Any], **fields: Any) -> None:
        links = {
            f"{name}_gbps": 0.0 for name in ("g1_to_g2", "g2_to_g1", "g2_to_g3", "g3_to_g2", "g2_to_g4", "g4_to_g2")
        }
        values: dict[str, Any] = {
            "ruleset": "dynamo-1.3",
            "num_gpu_blocks": 8,
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "speedup_ratio": 0.0,
            "emit_kv_events": True,
            "kv_cache_bytes_per_token": MEGABYTE_BLOCKS,
            "timing_model": FixedTiming(prefill_ms=0.0, decode_ms=0.0),
            "kvbm_tiers": KvbmTiers(**({"num_g2_blocks": 8} | links | tiers)),
        }
        self.config = EngineConfig(**(values | fields))
        self.face = face
        self.rank: Any = FACES[face](RankIdentity(23), self.config)
        self.kv: list[KvEvent] = []
        self.handoff = 10_000

    # ------------------------------------------------------------ one call each

    def do(self, command: Command, at: float = 0.0) -> CommandEffects:
        effects: CommandEffects = self.rank.apply_command(command, CommandContext(at))
        self._keep(effects.kv_events)
        return effects

    def submit(self, number: int, tokens: Sequence[int], out: int = 0, at: float = 0.0) -> CommandEffects:
        return self.do(Submit(Request(number, list(tokens), out)), at)

    def reserve(self, number: int, tokens: Sequence[int], at: float = 0.0) -> CommandEffects:
        return self.do(ReserveDestination(number, Request(number, list(tokens), 1)), at)

    def pass_at(self, at: float) -> RankPass:
        """One pass, completed where it starts or, if it takes time, at its end."""
        outcome: RankPass = self.rank.execute_pass(at)
        self._keep(outcome.start_effects.kv_events)
        self._keep(self.rank.complete_pass(outcome.pending, at).kv_events)
        self.check()
        return outcome

    def admitted(self, at: float) -> dict[int, int]:
        """Reused tokens of what a pass admits."""
        return {a.request_id: a.reused_input_tokens for a in self.pass_at(at).start_effects.admissions}

    def signals(self, at: float) -> list[int]:
        """Who gets a token in a pass."""
        return [output.request_id for output in self.pass_at(at).pending.effects.outputs]

    def tick(self, at: float) -> InternalEffects:
        return self._ticked(self.rank.tick_offload_only(at))

    def transport(self, at: float) -> InternalEffects:
        return self._ticked(self.rank.tick_offload_transport_only(at))

    def _ticked(self, effects: InternalEffects) -> InternalEffects:
        self._keep(effects.kv_events)
        self.check()
        return effects

    def _keep(self, events: Any) -> None:
        self.kv += list(events)

    def check(self) -> None:
        if self.face == "twin":
            self.rank.check()
        else:
            self.rank.check_integrity()

    # ------------------------------------------------------------ preparations

    def complete(self, number: int, tokens: Sequence[int], at: float = 0.0) -> None:
        """A prompt whose blocks are unused afterwards."""
        self.submit(number, tokens, 0, at)
        for _ in range(5):
            self.pass_at(at)
            if self.rank.is_empty():
                return
        raise AssertionError("the prompt does not end")

    def push_out(self, blocks: int, at: float = 0.0) -> None:
        """Evict what is unused until so many blocks are empty, over links that take no time."""
        self.handoff += 1
        first = 1_000_000 + self.handoff * 1000
        self.reserve(self.handoff, range(first, first + 4 * blocks), at)
        for _ in range(5):
            if self.handoff in self.state["reserved_blocks"]:
                break
            self.tick(at)
        assert self.handoff in self.state["reserved_blocks"]
        self.do(CancelDestination(self.handoff), at)
        self.tick(at)
        assert self.state["free_blocks"] >= blocks

    # ------------------------------------------------------------ looking

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.rank.state() if self.face == "twin" else rank_state(self.rank)
        return state

    def row(self, number: int) -> dict[str, Any]:
        row: dict[str, Any] = self.state["requests"][number]
        return row

    @property
    def active(self) -> int:
        return int(self.rank.metrics().active_blocks)

    @property
    def inactive(self) -> int:
        return int(self.rank.metrics().inactive_blocks)

    @property
    def preemptions(self) -> int:
        return int(self.rank.metrics().preemptions_total)

    @property
    def deadline(self) -> float | None:
        deadline: float | None = self.rank.next_internal_deadline_ms()
        return deadline

    @property
    def parked(self) -> list[int]:
        return [number for number, *_ in self.state["parked"] if number is not None]

    @property
    def dependent(self) -> list[int]:
        return list(self.state["dependent"])

    @property
    def in_g2(self) -> int:
        return len(self.state["tiers"]["g2"]["resident"])

    def hosted(self) -> list[KvEvent]:
        return [event for event in self.kv if event.storage_tier == "host_pinned"]
