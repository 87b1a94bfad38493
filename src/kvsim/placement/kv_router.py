"""The KV router: ranks by what they have cached and what they have to do (spec/replay.md section 6).

`KvRouterConfig` has the option names of the peer's router. The index of blocks, the load of the ranks and the
costs are `kvsim._core.router`; here are the order of things, the queue and the draws.
"""

from __future__ import annotations

import heapq
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvsim._core.router import RouterState
from kvsim.errors import ConfigError, TimingError
from kvsim.layout import Pool
from kvsim.placement.base import PlacedRequest, Placement, PoolInfo, Released, Route

__all__ = ["INEFFECTIVE", "KvRouter", "KvRouterConfig", "decode_router", "prefill_router"]

_AT = "router_config."
_POLICIES = ("fcfs", "lcfs", "wspt")
_TRACK_NONE, _TRACK_UNIQUE, _TRACK_HASHES = range(3)

#: Options that are accepted and decide nothing in a simulation, with the defaults of the peer.
INEFFECTIVE: dict[str, Any] = {
    "host_cache_hit_weight": 0.75,
    "disk_cache_hit_weight": 0.25,
    "use_kv_events": True,
    "durable_kv_events": False,
    "router_track_output_blocks": False,
    "router_replica_sync": False,
    "router_snapshot_threshold": 1_000_000,
    "router_reset_states": False,
    "router_ttl_secs": 120.0,
    "router_predicted_ttl_secs": None,
    "router_event_threads": 4,
    "router_policy_config": None,
    "use_remote_indexer": False,
    "serve_indexer": False,
    "skip_initial_worker_wait": False,
    "shared_cache_multiplier": 0.0,
    "shared_cache_type": "none",
    "enable_session_prefix_index": False,
    "conditional_disagg_enabled": False,
}


class KvRouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a KV router. Costs are in blocks; the rank of lowest cost gets the request.

    Parameters
    ----------
    overlap_score_credit : float
        Blocks of load that a cached block is worth; finite, >= 0. With 0 the cache decides nothing, but is still
        looked up and reported.
    overlap_score_credit_decay : float
        How fast that credit falls with the prompt load a rank has in excess of the least loaded one; 0: not at all.
    overlap_score_weight : float or None
        Older name: replaces `prefill_load_scale`; 0 sets the credit to 0 too.
    prefill_load_scale : float
        Weight of prompts to be computed against blocks in use.
    decode_active_request_weight : float
        Blocks that each live request of a rank counts beside those it uses.
    router_temperature : float
        0: lowest cost. Above: drawn with weights ``exp(-cost / ((max - min) * temperature))`` from
        ``numpy.random.Generator(PCG64([seed, role]))``, one `random()` per placement.
    router_tie_break : {"lowest", "random"}
        Among equal lowest costs: lowest (worker, rank), or a draw from that generator.
    router_track_active_blocks : bool
        Whether blocks of live requests are a load.
    router_assume_kv_reuse : bool
        Whether live requests share them; otherwise each counts its own.
    router_track_prefill_tokens : bool
        Whether prompts that are not computed yet are a load.
    router_prefill_load_model : "none", "aic" or TimingModel
        With a model, the load of a prompt falls linearly over ``predict_prefill_ms(1, length, cached)`` instead of
        at its first token; "aic" takes the model of the engines.
    router_queue_threshold : float or None
        Requests queue while every rank has more prompt tokens to compute than this times `max_num_batched_tokens`;
        None: never.
    router_queue_policy : {"fcfs", "lcfs", "wspt"}
        Who leaves the queue first: earliest arrival, latest arrival, least work. A higher `strict_priority` goes
        before all; `priority` (seconds, below 0 as 0) moves the arrival earlier, for lcfs later, and multiplies the
        weight of wspt by 1 + priority.
    kv_event_lag_ms : float
        KV events reach the index this long after the pass that caused them.
    host_cache_hit_weight, disk_cache_hit_weight, use_kv_events, durable_kv_events, router_track_output_blocks, \
router_replica_sync, router_snapshot_threshold, router_reset_states, router_ttl_secs, router_predicted_ttl_secs, \
router_event_threads, router_policy_config, use_remote_indexer, serve_indexer, skip_initial_worker_wait, \
shared_cache_multiplier, shared_cache_type, enable_session_prefix_index, conditional_disagg_enabled : object
        Accepted, without effect (`INEFFECTIVE`): a simulated router sees all events of one tier in order and dies
        with its run. A router warns once about those that differ from the peer's defaults.

    Raises
    ------
    ConfigError
        Names the field.
    """

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    overlap_score_weight: float | None = None
    prefill_load_scale: float = 1.0
    decode_active_request_weight: float = 0.0
    router_temperature: float = 0.0
    router_tie_break: Literal["lowest", "random"] = "lowest"
    router_track_active_blocks: bool = True
    router_assume_kv_reuse: bool = True
    router_track_prefill_tokens: bool = True
    router_prefill_load_model: Any = "none"
    router_queue_threshold: float | None = None
    router_queue_policy: Literal["fcfs", "lcfs", "wspt"] = "fcfs"
    kv_event_lag_ms: float = 0.0
    host_cache_hit_weight: Any = INEFFECTIVE["host_cache_hit_weight"]
    disk_cache_hit_weight: Any = INEFFECTIVE["disk_cache_hit_weight"]
    use_kv_events: Any = INEFFECTIVE["use_kv_events"]
    durable_kv_events: Any = INEFFECTIVE["durable_kv_events"]
    router_track_output_blocks: Any = INEFFECTIVE["router_track_output_blocks"]
    router_replica_sync: Any = INEFFECTIVE["router_replica_sync"]
    router_snapshot_threshold: Any = INEFFECTIVE["router_snapshot_threshold"]
    router_reset_states: Any = INEFFECTIVE["router_reset_states"]
    router_ttl_secs: Any = INEFFECTIVE["router_ttl_secs"]
    router_predicted_ttl_secs: Any = INEFFECTIVE["router_predicted_ttl_secs"]
    router_event_threads: Any = INEFFECTIVE["router_event_threads"]
    router_policy_config: Any = INEFFECTIVE["router_policy_config"]
    use_remote_indexer: Any = INEFFECTIVE["use_remote_indexer"]
    serve_indexer: Any = INEFFECTIVE["serve_indexer"]
    skip_initial_worker_wait: Any = INEFFECTIVE["skip_initial_worker_wait"]
    shared_cache_multiplier: Any = INEFFECTIVE["shared_cache_multiplier"]
    shared_cache_type: Any = INEFFECTIVE["shared_cache_type"]
    enable_session_prefix_index: Any = INEFFECTIVE["enable_session_prefix_index"]
    conditional_disagg_enabled: Any = INEFFECTIVE["conditional_disagg_enabled"]

    def __post_init__(self) -> None:
        for name in ("overlap_score_credit", "overlap_score_credit_decay", "prefill_load_scale", "kv_event_lag_ms"):
            self._number(name)
        for name in ("decode_active_request_weight", "router_temperature"):
            self._number(name)
        for name in ("overlap_score_weight", "router_queue_threshold"):
            if getattr(self, name) is not None:
                self._number(name)
        for name in ("router_track_active_blocks", "router_assume_kv_reuse", "router_track_prefill_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(_AT + name, f"expected true or false, got {getattr(self, name)!r}")
        for name, allowed in (("router_queue_policy", _POLICIES), ("router_tie_break", ("lowest", "random"))):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise ConfigError(_AT + name, f"must be one of {', '.join(allowed)}, got {value!r}")
        model = self.router_prefill_load_model
        if model not in ("none", "aic") and not callable(getattr(model, "predict_prefill_ms", None)):
            raise ConfigError(
                _AT + "router_prefill_load_model",
                f"must be none, aic or an object with predict_prefill_ms, got {model!r}",
            )

    def _number(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(_AT + name, f"expected a number, got {value!r}")
        if not math.isfinite(value) or value < 0:
            raise ConfigError(_AT + name, f"must be finite and >= 0, got {value}")

    @classmethod
    def parse(cls, values: Mapping[str, Any] | KvRouterConfig | None) -> KvRouterConfig:
        """Configuration from plain values; None: the defaults.

        Raises
        ------
        ConfigError
            Unknown key, wrong type or value: names the field.
        """
        if values is None:
            return cls()
        if isinstance(values, cls):
            return values
        if not isinstance(values, Mapping):
            raise ConfigError("router_config", f"expected None, a mapping or a KvRouterConfig, got {values!r}")
        for key in values:
            if key not in cls.__struct_fields__:
                raise ConfigError(f"{_AT}{key}", "unknown field")
        return cls(**values)

    @property
    def credit(self) -> float:
        """`overlap_score_credit` in effect."""
        return 0.0 if self.overlap_score_weight == 0 else float(self.overlap_score_credit)

    @property
    def prefill_scale(self) -> float:
        """`prefill_load_scale` in effect."""
        return float(self.prefill_load_scale if self.overlap_score_weight is None else self.overlap_score_weight)

    def ineffective(self) -> tuple[str, ...]:
        """Options that were changed and decide nothing."""
        return tuple(name for name, default in INEFFECTIVE.items() if getattr(self, name) != default)


def prefill_router(config: KvRouterConfig) -> KvRouterConfig:
    """Configuration of the prefill pool of a disaggregated run: blocks in use are no load."""
    return msgspec.structs.replace(config, router_track_active_blocks=False)


def decode_router(config: KvRouterConfig) -> KvRouterConfig:
    """Configuration of its decode pool: blind to caches and prompts, each request has blocks of its own."""
    return msgspec.structs.replace(
        config,
        overlap_score_credit=0.0,
        router_assume_kv_reuse=False,
        router_track_prefill_tokens=False,
        router_prefill_load_model="none",
    )


class _Live(NamedTuple):
    """A placed request, until it is terminal."""

    rank: int  # of RouterState
    hashes: npt.NDArray[np.uint64] | None
    num_blocks: int


class _Waiting(NamedTuple):
    """A request in the queue; tuples compare by their first two fields."""

    key: tuple[float, ...]
    number: int
    request: PlacedRequest
    overlap: npt.NDArray[np.int32]  # by rank, when the request arrived
    best: int


class _Modelled(NamedTuple):
    """A prompt whose load falls with time."""

    tokens: int
    since_ms: float
    duration_ms: float

    def left(self, now_ms: float) -> float:
        past = now_ms - self.since_ms
        return self.tokens * (1.0 - past / self.duration_ms) if past < self.duration_ms else 0.0


class KvRouter(Placement):
    """Places each request on the rank where it costs least.

    The overlap of a request with the caches is looked up when it arrives, also if it then waits in the queue.

    Parameters
    ----------
    config : KvRouterConfig, mapping or None
    """

    wants_kv_events = True
    wants_first_tokens = True
    wants_terminals = True

    def __init__(self, config: KvRouterConfig | Mapping[str, Any] | None = None) -> None:
        self.config = KvRouterConfig.parse(config)
        ignored = self.config.ineffective()
        if ignored:
            warnings.warn(f"options of the router without effect in a simulation: {', '.join(ignored)}", stacklevel=2)

    def start(self, pool: PoolInfo) -> None:
        """Number the ranks of the pool and read the options that depend on it."""
        config = self.config
        # Only the workers of the other pools have caches that a router follows.
        self.wants_kv_events = pool.role is not Pool.DECODE
        self.wants_first_tokens = config.router_track_prefill_tokens
        self._dp_size = pool.dp_size
        self._block_size = pool.block_size
        self._model = self._prefill_model(pool)
        self._tracking = _TRACK_NONE
        if config.router_track_active_blocks:
            self._tracking = _TRACK_HASHES if config.router_assume_kv_reuse else _TRACK_UNIQUE
        self._state = RouterState(
            pool.block_size,
            tracking=self._tracking,
            track_prefill=config.router_track_prefill_tokens,
            credit=config.credit,
            credit_decay=config.overlap_score_credit_decay,
            prefill_scale=config.prefill_scale,
            request_weight=config.decode_active_request_weight,
        )
        self._busy_above: float | None = None
        if config.router_queue_threshold is not None:
            budget = math.inf if pool.max_num_batched_tokens is None else pool.max_num_batched_tokens
            self._busy_above = config.router_queue_threshold * budget if budget < math.inf else math.inf
        self._draws: np.random.Generator | None = None
        if config.router_temperature > 0 or config.router_tie_break == "random":
            self._draws = np.random.Generator(np.random.PCG64([pool.seed, int(pool.role)]))
        self._ranks: dict[tuple[int, int], int] = {}  # (worker, dp rank) -> rank of the state
        self._places: list[tuple[int, int]] = []  # of the candidates, in order
        self._active: set[int] = set()
        self._live: dict[int, _Live] = {}
        self._computing: dict[int, int] = {}  # row -> prompt tokens in the load of its rank
        self._modelled: dict[int, dict[int, _Modelled]] = defaultdict(dict)  # rank -> row -> its prompt
        self._queue: list[_Waiting] = []
        self._queued: set[int] = set()
        self._numbers = 0
        self._late_events: list[tuple[float, int, int, Any, Any]] = []  # heap: (visible at, number, rank, ...)
        for worker in sorted(pool.workers):
            self._add_worker(worker)
        self._set_candidates()

    def _prefill_model(self, pool: PoolInfo) -> Any:
        model = self.config.router_prefill_load_model
        if model == "none" or not self.config.router_track_prefill_tokens:
            return None
        if model == "aic":
            if pool.timing is None:
                raise ConfigError(_AT + "router_prefill_load_model", "aic needs a timing model of the engines to ask")
            return pool.timing
        return model

    # ------------------------------------------------------------ requests

    def place(self, request: PlacedRequest, now_ms: float) -> Route | None:
        """Look the prompt up, then choose the cheapest rank, or keep the request."""
        self._show_late_events(now_ms)
        looks = self.wants_kv_events or self._tracking == _TRACK_HASHES
        best = self._state.match(request.block_hashes) if looks else 0
        if self._queue or not self._places or self._is_busy(now_ms):
            self._keep(request, best, now_ms)
            return None
        return self._choose(request, self._state.overlap, best, now_ms)

    def _choose(self, request: PlacedRequest, overlap: npt.NDArray[np.int32], best: int, now_ms: float) -> Route:
        """Place a request whose blocks were the last to be matched."""
        state, size = self._state, self._block_size
        if self._model is not None:
            self._let_decay(now_ms)
        position = state.choose(request.input_tokens, overlap, request.dp_rank)
        if self._draws is not None:
            position = self._draw(state.costs)
        rank = int(state.candidates[position])
        cached = int(overlap[rank])
        blocks = request.input_tokens // size
        computed = max(0, request.input_tokens - cached * size)
        hashes = request.block_hashes if self._tracking == _TRACK_HASHES else None
        row = request.row
        self._live[row] = _Live(rank, hashes, blocks)
        if self._model is None:
            state.begin(rank, hashes, blocks, computed)
            self._computing[row] = computed
        else:
            state.begin(rank, hashes, blocks, 0)
            self._begin_modelled(rank, request, cached, computed, now_ms)
        worker, dp_rank = self._places[position]
        tokens = min(cached * size, request.input_tokens)
        return Route(worker, dp_rank, tokens, cached, best, float(state.costs[position]))

    def _draw(self, costs: npt.NDArray[np.float64]) -> int:
        """Position of a candidate, drawn."""
        assert self._draws is not None
        asked = np.flatnonzero(np.isfinite(costs))
        low, high = float(costs[asked].min()), float(costs[asked].max())
        temperature = self.config.router_temperature
        if temperature > 0:
            spread = (high - low) * temperature
            weights = np.exp((low - costs[asked]) / spread) if spread > 0 else np.ones(len(asked))
        elif self.config.router_tie_break == "random":
            asked = np.flatnonzero(costs == low)
            weights = np.ones(len(asked))
        below = np.cumsum(weights)
        chosen = int(np.searchsorted(below, self._draws.random() * below[-1], side="right"))
        return int(asked[min(chosen, len(asked) - 1)])

    def prefill_completed(self, row: int, now_ms: float) -> Released:
        """Take the prompt out of the load of its rank; who waits may follow."""
        live = self._live.get(row)
        if live is None:
            return ()
        self._drop_prefill(row, live)
        return self._drain(now_ms)

    def request_terminal(self, row: int, now_ms: float) -> Released:
        """Take all of the request out of the load of its rank; who waits may follow."""
        live = self._live.pop(row, None)
        if live is None:
            return ()
        self._drop_prefill(row, live)
        self._state.end(live.rank, live.hashes, live.num_blocks, 0)
        return self._drain(now_ms)

    def _drop_prefill(self, row: int, live: _Live) -> None:
        computed = self._computing.pop(row, 0)
        if computed:
            self._state.computed(live.rank, computed)
        if self._model is not None:
            self._modelled[live.rank].pop(row, None)

    def cancel(self, row: int, now_ms: float) -> Released:
        """Take a request out of the queue, or out of the load."""
        if row in self._queued:
            self._queued.remove(row)
            self._queue = [waiting for waiting in self._queue if waiting.request.row != row]
            heapq.heapify(self._queue)
            return ()
        return self.request_terminal(row, now_ms)

    # ------------------------------------------------------------ the queue

    def _is_busy(self, now_ms: float) -> bool:
        """Whether requests must wait for prompts to be computed."""
        if self._busy_above is None:
            return False
        if self._model is not None:
            self._let_decay(now_ms)
        return self._state.all_busy(self._busy_above)

    def _keep(self, request: PlacedRequest, best: int, now_ms: float) -> None:
        priority = max(0.0, request.priority)
        arrival_s = now_ms / 1000.0
        policy = self.config.router_queue_policy
        if policy == "fcfs":
            order = arrival_s - priority
        elif policy == "lcfs":
            order = -(arrival_s + priority)
        else:
            order = -(1.0 + priority) / max(1, request.input_tokens - best * self._block_size)
        self._numbers += 1
        # Numbers grow with arrivals, so they settle ties as arrivals would.
        key = (-request.strict_priority, order)
        heapq.heappush(self._queue, _Waiting(key, self._numbers, request, self._state.overlap.copy(), best))
        self._queued.add(request.row)

    def _drain(self, now_ms: float) -> Released:
        """Place those who wait, while some rank is not busy."""
        released: list[tuple[PlacedRequest, Route]] = []
        while self._queue and self._places and not self._is_busy(now_ms):
            waiting = heapq.heappop(self._queue)
            request = waiting.request
            self._queued.remove(request.row)
            if self._tracking == _TRACK_HASHES:
                self._state.match(request.block_hashes)
            overlap = waiting.overlap
            if len(overlap) < len(self._state.overlap):
                overlap = np.pad(overlap, (0, len(self._state.overlap) - len(overlap)))
            released.append((request, self._choose(request, overlap, waiting.best, now_ms)))
        return released

    def pending_count(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    # ------------------------------------------------------------ prompts under a model

    def _begin_modelled(self, rank: int, request: PlacedRequest, cached: int, computed: int, now_ms: float) -> None:
        prefix = min(cached * self._block_size, request.input_tokens)
        duration = self._model.predict_prefill_ms(1, request.input_tokens, prefix)
        if isinstance(duration, bool) or not isinstance(duration, (int, float)) or not 0 <= duration < math.inf:
            raise TimingError(f"predict_prefill_ms must return finite milliseconds >= 0, got {duration!r}")
        self._modelled[rank][request.row] = _Modelled(computed, now_ms, float(duration))

    def _let_decay(self, now_ms: float) -> None:
        """Write what is left of all prompts into the loads."""
        loads = self._state.loads["prefill_tokens"]
        for rank, prompts in self._modelled.items():
            loads[rank] = sum(prompt.left(now_ms) for prompt in prompts.values())

    def active_prefill_tokens(self, worker: int, dp_rank: int, now_ms: float) -> float:
        """Prompt tokens that a rank has to compute, as the router counts them."""
        if self._model is not None:
            self._let_decay(now_ms)
        return float(self._state.loads["prefill_tokens"][self._ranks[worker, dp_rank]])

    # ------------------------------------------------------------ caches

    def observe(self, worker: int, dp_rank: int, events: npt.NDArray[Any], blocks: npt.NDArray[Any]) -> None:
        """Follow the events, at once or after `kv_event_lag_ms`."""
        rank = self._ranks.get((worker, dp_rank))
        if rank is None or not self.wants_kv_events or len(events) == 0:
            return
        if self.config.kv_event_lag_ms == 0:
            self._state.apply(rank, events, blocks)
            return
        self._delay(rank, events.copy(), blocks.copy())

    def _delay(self, rank: int, events: npt.NDArray[Any], blocks: npt.NDArray[Any]) -> None:
        visible = float(events["at_ms"][0]) + self.config.kv_event_lag_ms
        self._numbers += 1
        heapq.heappush(self._late_events, (visible, self._numbers, rank, events, blocks))

    def _show_late_events(self, now_ms: float) -> None:
        late, lag = self._late_events, self.config.kv_event_lag_ms
        while late and late[0][0] <= now_ms:
            _, _, rank, events, blocks = heapq.heappop(late)
            count = int(np.searchsorted(events["at_ms"] + lag, now_ms, side="right"))
            self._state.apply(rank, events[:count], blocks)
            if count < len(events):
                self._delay(rank, events[count:], blocks)

    # ------------------------------------------------------------ workers

    def _add_worker(self, worker: int) -> None:
        self._active.add(worker)
        for dp_rank in range(self._dp_size):
            rank = self._state.add_rank(worker, dp_rank)
            self._ranks[worker, dp_rank] = rank
            for waiting in self._queue:
                # The number may have been that of a rank which is gone.
                if rank < len(waiting.overlap):
                    waiting.overlap[rank] = 0

    def _set_candidates(self) -> None:
        self._places = [place for place in sorted(self._ranks) if place[0] in self._active]
        self._state.set_candidates([self._ranks[place] for place in self._places])

    def worker_ready(self, worker: int, now_ms: float) -> Released:
        """Add its ranks, which have nothing cached."""
        if worker not in self._active:
            self._add_worker(worker)
            self._set_candidates()
        return ()

    def worker_draining(self, worker: int, now_ms: float) -> Released:
        """Choose its ranks no more; their blocks and load stay until it is removed."""
        self._active.discard(worker)
        self._set_candidates()
        return ()

    def worker_removed(self, worker: int, now_ms: float) -> Released:
        """Forget its ranks."""
        self.worker_draining(worker, now_ms)
        gone = [
            self._ranks.pop((worker, dp_rank)) for dp_rank in range(self._dp_size) if (worker, dp_rank) in self._ranks
        ]
        for rank in gone:
            self._state.remove_rank(rank)
            self._modelled.pop(rank, None)
        if gone:
            self._live = {row: live for row, live in self._live.items() if live.rank not in gone}
            self._computing = {row: tokens for row, tokens in self._computing.items() if row in self._live}
            self._late_events = [late for late in self._late_events if late[2] not in gone]
            heapq.heapify(self._late_events)
        return ()

    def topology_settled(self, now_ms: float) -> Released:
        """Let those who wait follow the change."""
        return self._drain(now_ms)
