"""Twin of the handoff coordinator in plain ifs (handoff.md section 8, replay.md section 5.1).

It has no states, only what was asked for, what came of it and what is known.
"""

from __future__ import annotations

import math
from typing import Any

from kvsim.contract import TransferTiming

SUBMIT, RESERVE, TRANSFER = "SUBMIT_PREFILL", "RESERVE_DESTINATION", "START_TRANSFER"
ACTIVATE, RELEASE = "ACTIVATE_DESTINATION", "RELEASE_SOURCE"
CANCEL_SOURCE, CANCEL_DESTINATION = "CANCEL_SOURCE", "CANCEL_DESTINATION"
COMPLETE, COMPLETE_CANCELED = "COMPLETE", "COMPLETE_CANCELED"

GOOD = {
    SUBMIT: {"SUBMITTED"},
    RESERVE: {"ACCEPTED"},
    TRANSFER: {"SCHEDULED"},
    ACTIVATE: {"APPLIED"},
    RELEASE: {"APPLIED", "NOOP"},
    CANCEL_SOURCE: {"APPLIED", "NOOP"},
    CANCEL_DESTINATION: {"APPLIED", "NOOP"},
    COMPLETE: {"APPLIED"},
    COMPLETE_CANCELED: {"APPLIED"},
}


class RefusedError(Exception):
    """The model's error: nothing has changed."""


class CoordinatorModel:
    def __init__(self, source_first: bool, fallback_ms: float) -> None:
        self.source_first = source_first
        self.fallback_ms = fallback_ms
        self.actions: list[str] = []
        self.results: dict[int, str] = {}
        self.facts: dict[str, Any] = {}
        self.lifecycle: list[str] = []
        #: canceled while blocks were on the wire
        self.waits_for_wire = False
        self.giving_up = False
        self.delay_ms: float | None = None

    # ------------------------------------------------------------ what is known

    def result(self, action: str) -> str | None:
        """Outcome of an action of this kind, None without one."""
        if action not in self.actions:
            return None
        return self.results.get(self.actions.index(action) + 1)

    def good(self, action: str) -> bool:
        return self.result(action) in GOOD[action]

    @property
    def ended(self) -> bool:
        return bool(self.actions) and self.actions[-1] in (COMPLETE, COMPLETE_CANCELED)

    # ------------------------------------------------------------ input

    def start(self) -> list[tuple[int, str]]:
        if self.actions or self.giving_up:
            raise RefusedError
        return self.ask(SUBMIT if self.source_first else RESERVE)

    def fact(self, name: str, value: Any = None) -> list[tuple[int, str]]:
        if name in ("FAILED", "TIMED_OUT", "CANCELED"):
            return self.stop(name)
        if self.giving_up or name in self.facts:
            return []
        if self.waits_for_wire:
            if name == "TRANSFER_COMPLETED" and self.good(TRANSFER):
                return self.clean_up()
            if name == "TRANSFER_COMPLETED":
                raise RefusedError
            return []
        needed = {"SOURCE_HELD": SUBMIT, "DESTINATION_RESERVED": RESERVE, "TRANSFER_COMPLETED": TRANSFER}[name]
        if not self.good(needed):
            raise RefusedError
        if name == "SOURCE_HELD":
            delay = self.wire_time(value, self.facts.get("DESTINATION_RESERVED"))
            self.lifecycle.append("source_held")
        elif name == "DESTINATION_RESERVED":
            if not isinstance(value, int) or value < 0:
                raise RefusedError
            held = self.facts.get("SOURCE_HELD")
            delay = None if held is None else self.wire_time(held, value)
            self.lifecycle.append("destination_reserved")
        self.facts[name] = value
        if name == "TRANSFER_COMPLETED":
            return self.ask(ACTIVATE)
        if "SOURCE_HELD" in self.facts and "DESTINATION_RESERVED" in self.facts:
            self.delay_ms = self.fallback_ms if delay is None else delay
            return self.ask(TRANSFER)
        return self.ask(RESERVE if self.source_first else SUBMIT)

    def outcome(self, number: int, name: str) -> list[tuple[int, str]]:
        if not 1 <= number <= len(self.actions):
            raise RefusedError
        if number in self.results:
            if self.results[number] != name:
                raise RefusedError
            return []
        action = self.actions[number - 1]
        may_fail = action in (SUBMIT, RESERVE, TRANSFER, ACTIVATE, RELEASE)
        if name not in GOOD[action] and not (name == "FAILED" and may_fail):
            raise RefusedError
        self.results[number] = name
        if action in (COMPLETE, COMPLETE_CANCELED):
            return []
        if self.giving_up:
            return self.finish_cleaning()
        if name == "FAILED":
            return self.clean_up()
        if action == RESERVE:
            self.lifecycle.append("destination_accepted")
        if action == ACTIVATE:
            self.lifecycle.append("destination_activated")
            return self.ask(RELEASE)
        if action == RELEASE:
            self.lifecycle += ["source_released", "completed"]
            return self.ask(COMPLETE)
        return []

    # ------------------------------------------------------------ parts

    def ask(self, *actions: str) -> list[tuple[int, str]]:
        first = len(self.actions) + 1
        self.actions += actions
        return list(enumerate(actions, first))

    def stop(self, why: str) -> list[tuple[int, str]]:
        if self.giving_up:
            return []
        if self.actions and self.actions[-1] == COMPLETE:
            if why != "CANCELED":
                return []
            self.giving_up = True
            return self.ask(CANCEL_DESTINATION)
        on_the_wire = TRANSFER in self.actions and "TRANSFER_COMPLETED" not in self.facts
        if why == "CANCELED" and on_the_wire:
            self.waits_for_wire = True
            return []
        return self.clean_up()

    def clean_up(self) -> list[tuple[int, str]]:
        self.giving_up = True
        cancels = []
        if SUBMIT in self.actions:
            cancels.append(CANCEL_SOURCE)
        if RESERVE in self.actions:
            cancels.append(CANCEL_DESTINATION)
        if cancels:
            return self.ask(*cancels)
        return self.finish_cleaning()

    def finish_cleaning(self) -> list[tuple[int, str]]:
        if COMPLETE_CANCELED in self.actions:
            return []
        for cancel in (CANCEL_SOURCE, CANCEL_DESTINATION):
            if cancel in self.actions and not self.good(cancel):
                return []
        self.lifecycle.append("canceled")
        return self.ask(COMPLETE_CANCELED)

    def wire_time(self, timing: Any, missing: int | None) -> float | None:
        if not isinstance(timing, TransferTiming):
            raise RefusedError
        if timing.mode not in ("full_prompt", "destination_missing"):
            raise RefusedError
        bandwidth = timing.bandwidth_gb_s
        if bandwidth is not None and (bandwidth < 0 or not math.isfinite(bandwidth)):
            raise RefusedError
        if timing.bytes_per_token is None or bandwidth is None or bandwidth == 0:
            return None
        tokens = timing.full_prompt_tokens if timing.mode == "full_prompt" else missing
        if tokens is None:
            return None
        return tokens * timing.bytes_per_token / (bandwidth * 1e9) * 1000.0
