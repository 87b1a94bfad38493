"""Engine configuration: strict, typed, every error names its field.

Fields, defaults and rules are those of spec/engine-contract.md section 2 and
spec/vllm.md section 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import force_setattr

from kvsim.errors import ConfigError
from kvsim.rulesets import Ruleset, get_ruleset

__all__ = [
    "DEFAULT_ACCEPT_RATES",
    "DEFAULT_BLOCK_SIZE",
    "EngineConfig",
    "ExternalTiming",
    "FixedTiming",
    "KvbmTiers",
    "NativeHostOffload",
    "NpzTiming",
    "PolynomialTiming",
    "SglangConfig",
    "TimingSpec",
    "TrtllmConfig",
    "load_config",
    "parse_accept_rates",
    "parse_config",
]

Backend: TypeAlias = Literal["vllm", "sglang", "trtllm"]

#: Block size when none is given (engine-contract.md section 2).
DEFAULT_BLOCK_SIZE = {"vllm": 64, "sglang": 1, "trtllm": 32}

#: Conditional acceptance rates when only `aic_nextn` is given (vllm.md section 1).
DEFAULT_ACCEPT_RATES = "0.85,0.3,0,0,0"

# Token counts and block ids are 32-bit in the state tables.
_MAX_I32 = 2**31 - 1
_MAX_U64 = 2**64 - 1


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of configuration objects: immutable, keyword only, unknown keys are errors."""


class PolynomialTiming(_Strict, frozen=True, tag="polynomial", tag_field="type"):
    """The built-in polynomial of timing-and-fpm.md section 2."""


class FixedTiming(_Strict, frozen=True, tag="fixed", tag_field="type"):
    """Constant pass times.

    Parameters
    ----------
    prefill_ms, decode_ms : float
        Time of a pass with prefill work, and of one with decode work. Finite, >= 0.
    """

    prefill_ms: float
    decode_ms: float

    def __post_init__(self) -> None:
        _number(self, "prefill_ms", at="timing_model.")
        _number(self, "decode_ms", at="timing_model.")


class NpzTiming(_Strict, frozen=True, tag="npz", tag_field="type"):
    """A profile file, arrays as in timing-and-fpm.md section 2.1.

    Parameters
    ----------
    path : str
        The ``.npz`` file.
    """

    path: str

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError("timing_model.path", f"expected the path of an .npz file, got {self.path!r}")


class ExternalTiming(_Strict, frozen=True, tag="external", tag_field="type"):
    """A model supplied as an object when the rank or the run is built.

    Parameters
    ----------
    provider : str
        Its name; must not be blank.
    config : dict
        Passed through, not read.
    """

    provider: str
    config: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.provider, str) or not self.provider.strip():
            raise ConfigError("timing_model.provider", f"must not be blank, got {self.provider!r}")


TimingSpec: TypeAlias = PolynomialTiming | FixedTiming | NpzTiming | ExternalTiming


class SglangConfig(_Strict, frozen=True):
    """Options of the SGLang scheduler (spec/sglang.md section 1)."""

    schedule_policy: Literal["fifo", "lpm"] = "fifo"
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int = 8192
    clip_max_new_tokens: int = 4096
    schedule_conservativeness: float = 1.0

    def __post_init__(self) -> None:
        at = "sglang."
        _choice(self, "schedule_policy", ("fifo", "lpm"), at=at)
        _integer(self, "max_prefill_tokens", 1, at=at)
        _integer(self, "chunked_prefill_size", 1, at=at)
        _integer(self, "clip_max_new_tokens", 0, at=at)
        _number(self, "schedule_conservativeness", at=at)


class TrtllmConfig(_Strict, frozen=True):
    """Options of the TensorRT-LLM scheduler."""

    capacity_scheduler_policy: Literal["guaranteed_no_evict"] = "guaranteed_no_evict"

    def __post_init__(self) -> None:
        _choice(self, "capacity_scheduler_policy", ("guaranteed_no_evict",), at="trtllm.")


class NativeHostOffload(_Strict, frozen=True):
    """Write-through KV tier in host memory (spec/host-offload.md part A).

    Parameters
    ----------
    num_host_blocks : int
        Capacity, > 0.
    d2h_bandwidth_gbps, h2d_bandwidth_gbps : float
        Decimal GB/s, finite, >= 0; 0 is instantaneous.
    """

    num_host_blocks: int
    d2h_bandwidth_gbps: float = 32.0
    h2d_bandwidth_gbps: float = 32.0

    def __post_init__(self) -> None:
        at = "native_host_offload."
        _integer(self, "num_host_blocks", 1, _MAX_U64, at=at)
        _number(self, "d2h_bandwidth_gbps", at=at)
        _number(self, "h2d_bandwidth_gbps", at=at)


#: Blocks of a transfer, and transfers at a time, when none are given (host-offload.md section 7).
_DEFAULT_OFFLOAD_BATCH = 32


class KvbmTiers(_Strict, frozen=True):
    """KV tiers that take what the device evicts: G2 (host), G3 (disk), G4 (object store); spec/host-offload.md part B.

    Parameters
    ----------
    num_g2_blocks : int
        Capacity of G2 of each rank, > 0.
    num_g3_blocks : int
        Capacity of G3; 0: there is none. The workers of a run whose block size, bytes per token, G3, G4 and their
        bandwidths are equal share one G3, one G4 and the links to them, whatever their pool.
    g4_storage : bool
        Whether there is an object store, unbounded, shared like G3.
    offload_batch_size : int
        Blocks of a transfer on the way down, and how many such transfers run at a time; 0 is 32.
    g1_to_g2_gbps, g2_to_g1_gbps, g2_to_g3_gbps, g3_to_g2_gbps, g2_to_g4_gbps, g4_to_g2_gbps : float
        Decimal GB/s of each link, finite; 0 or less is unlimited.
    """

    num_g2_blocks: int
    num_g3_blocks: int = 0
    g4_storage: bool = False
    offload_batch_size: int = _DEFAULT_OFFLOAD_BATCH
    g1_to_g2_gbps: float = 14.0
    g2_to_g1_gbps: float = 14.0
    g2_to_g3_gbps: float = 7.0
    g3_to_g2_gbps: float = 7.0
    g2_to_g4_gbps: float = 4.0
    g4_to_g2_gbps: float = 4.0

    def __post_init__(self) -> None:
        at = "kvbm_tiers."
        _integer(self, "num_g2_blocks", 1, _MAX_U64, at=at)
        _integer(self, "num_g3_blocks", 0, _MAX_U64, at=at)
        _boolean(self, "g4_storage", at=at)
        _integer(self, "offload_batch_size", 0, at=at)
        if self.offload_batch_size == 0:
            force_setattr(self, "offload_batch_size", _DEFAULT_OFFLOAD_BATCH)
        for name in TIER_BANDWIDTHS:
            _number(self, name, signed=True, at=at)


#: Fields of `KvbmTiers` that are bandwidths, in the order of `kvsim.layout.TierLink`.
TIER_BANDWIDTHS = (
    "g1_to_g2_gbps",
    "g2_to_g1_gbps",
    "g2_to_g3_gbps",
    "g3_to_g2_gbps",
    "g2_to_g4_gbps",
    "g4_to_g2_gbps",
)


class EngineConfig(_Strict, frozen=True):
    """Configuration of one scheduler rank.

    Parameters
    ----------
    backend : {"vllm", "sglang", "trtllm"}
        Which scheduler.
    ruleset : str
        Which generation of it, see `kvsim.rulesets.RULESETS`.
    num_gpu_blocks : int
        KV pool, blocks, > 0.
    block_size : int
        Tokens per block; at least 2 for vllm and trtllm. By backend when omitted:
        64, 1, 32. A copy with another `backend` keeps it: use `for_backend`.
    max_model_len : int or None
        Prompt plus output limit, tokens. Prompts at or over it are rejected.
    max_num_seqs : int or None
        Cap of the running set; None is unlimited.
    max_num_batched_tokens : int or None
        Token budget of a pass; None is unlimited.
    enable_prefix_caching, enable_chunked_prefill : bool
    prefill_decode_interval : int
        SGLang: passes without prefill after one that computed prompt tokens.
    speedup_ratio, decode_speedup_ratio : float
        Divide durations; finite, >= 0; 0 leaves them as they are.
    aic_nextn : int or None
        Draft tokens of speculative decoding.
    aic_nextn_accept_rates : str or None
        Comma list of conditional acceptance rates in [0, 1].
    aic_mtp_seed : int
        Seed of the acceptance draws, 64 bits.
    worker_type : {"aggregated", "prefill", "decode"}
    preemption_mode : {"lifo", "fifo"}
        Victim of a preemption: newest or oldest running request.
    emit_kv_events, emit_kv_token_ids : bool
        The second requires the first.
    kv_transfer_bytes_per_token : int or None
        Bytes of KV moved per token in a handoff. `kv_bytes_per_token` is an input alias.
    kv_cache_bytes_per_token : int or None
        Bytes of KV per token, for the lower tiers.
    native_host_offload : NativeHostOffload or None
    kvbm_tiers : KvbmTiers or None
        In place of `native_host_offload`; attached only with `kv_cache_bytes_per_token`, see `tiers_attached`.
    kv_transfer_bandwidth : float or None
        GB/s (1e9 bytes); 0 means "no transfer model".
    kv_transfer_timing_mode : {"full_prompt", "destination_missing"}
    timing_model : PolynomialTiming, FixedTiming, NpzTiming or ExternalTiming
    sglang : SglangConfig
    trtllm : TrtllmConfig

    Raises
    ------
    ConfigError
        Naming the first offending field, the value and what is allowed.
    """

    backend: Backend = "vllm"
    ruleset: str = "dynamo"
    num_gpu_blocks: int = 16384
    block_size: int | UnsetType = UNSET
    max_model_len: int | None = None
    max_num_seqs: int | None = 256
    max_num_batched_tokens: int | None = 8192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    prefill_decode_interval: int = 0
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    aic_nextn: int | None = None
    aic_nextn_accept_rates: str | None = None
    aic_mtp_seed: int = 42
    worker_type: Literal["aggregated", "prefill", "decode"] = "aggregated"
    preemption_mode: Literal["lifo", "fifo"] = "lifo"
    emit_kv_events: bool = False
    emit_kv_token_ids: bool = False
    kv_transfer_bytes_per_token: int | None = None
    kv_cache_bytes_per_token: int | None = None
    native_host_offload: NativeHostOffload | None = None
    kvbm_tiers: KvbmTiers | None = None
    kv_transfer_bandwidth: float | None = None
    kv_transfer_timing_mode: Literal["full_prompt", "destination_missing"] = "full_prompt"
    timing_model: TimingSpec = msgspec.field(default_factory=PolynomialTiming)
    sglang: SglangConfig = msgspec.field(default_factory=SglangConfig)
    trtllm: TrtllmConfig = msgspec.field(default_factory=TrtllmConfig)

    def __post_init__(self) -> None:
        # The order is the validation order of engine-contract.md section 2.
        _choice(self, "backend", ("vllm", "sglang", "trtllm"))
        get_ruleset(self.ruleset)
        _integer(self, "num_gpu_blocks", 1)
        if self.block_size is UNSET:
            force_setattr(self, "block_size", DEFAULT_BLOCK_SIZE[self.backend])
        _integer(self, "block_size", 1 if self.backend == "sglang" else 2)
        if self.num_gpu_blocks * self.tokens_per_block > 2**62:
            raise ConfigError("num_gpu_blocks", f"num_gpu_blocks * block_size overflows, got {self.num_gpu_blocks}")
        _integer(self, "max_model_len", 1, optional=True)
        _integer(self, "max_num_seqs", 1, optional=True)
        _integer(self, "max_num_batched_tokens", 1, optional=True)
        _boolean(self, "enable_prefix_caching")
        _boolean(self, "enable_chunked_prefill")
        _integer(self, "prefill_decode_interval", 0)
        _number(self, "speedup_ratio")
        _number(self, "decode_speedup_ratio")
        self._check_speculation()
        _choice(self, "worker_type", ("aggregated", "prefill", "decode"))
        _choice(self, "preemption_mode", ("lifo", "fifo"))
        self._check_backend()
        _boolean(self, "emit_kv_events")
        _boolean(self, "emit_kv_token_ids")
        if self.emit_kv_token_ids and not self.emit_kv_events:
            raise ConfigError("emit_kv_token_ids", "requires emit_kv_events")
        _integer(self, "kv_transfer_bytes_per_token", 1, _MAX_U64, optional=True)
        _integer(self, "kv_cache_bytes_per_token", 1, _MAX_U64, optional=True)
        self._check_offload()
        self._check_tiers()
        _number(self, "kv_transfer_bandwidth", optional=True)
        _choice(self, "kv_transfer_timing_mode", ("full_prompt", "destination_missing"))
        if not isinstance(self.timing_model, (PolynomialTiming, FixedTiming, NpzTiming, ExternalTiming)):
            raise ConfigError(
                "timing_model", f"expected a polynomial, fixed, npz or external model, got {self.timing_model!r}"
            )

    def _check_speculation(self) -> None:
        _integer(self, "aic_nextn", 1, 5 if self.rules.always_draft else 64, optional=True)
        if self.aic_nextn_accept_rates is not None:
            if self.aic_nextn is None:
                raise ConfigError("aic_nextn_accept_rates", "requires aic_nextn")
            parse_accept_rates(self.aic_nextn_accept_rates, self.aic_nextn)
        if self.aic_nextn is not None and self.decode_speedup_ratio != 1.0:
            raise ConfigError(
                "decode_speedup_ratio", f"must be 1.0 when aic_nextn is set, got {self.decode_speedup_ratio}"
            )
        _integer(self, "aic_mtp_seed", 0, _MAX_U64)

    def _check_backend(self) -> None:
        for name, kind in (("sglang", SglangConfig), ("trtllm", TrtllmConfig)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(name, f"expected a {kind.__name__}, got {getattr(self, name)!r}")
        if self.backend != "sglang":
            if self.prefill_decode_interval:
                raise ConfigError(
                    "prefill_decode_interval", f"needs backend sglang, got {self.prefill_decode_interval}"
                )
            return
        if not self.enable_chunked_prefill:
            raise ConfigError("enable_chunked_prefill", "must be true for backend sglang")
        page, chunk, limit = self.tokens_per_block, self.sglang.chunked_prefill_size, self.sglang.max_prefill_tokens
        if chunk % page:
            raise ConfigError("sglang.chunked_prefill_size", f"must be a multiple of block_size {page}, got {chunk}")
        if limit < page:
            raise ConfigError("sglang.max_prefill_tokens", f"must be at least block_size {page}, got {limit}")

    def _check_offload(self) -> None:
        offload = self.native_host_offload
        if offload is None:
            return
        if not isinstance(offload, NativeHostOffload):
            raise ConfigError("native_host_offload", f"expected a NativeHostOffload, got {offload!r}")
        for field_name, want in (
            ("backend", "vllm"),
            ("worker_type", "aggregated"),
            ("enable_prefix_caching", True),
            ("aic_nextn", None),
        ):
            value = getattr(self, field_name)
            if value != want:
                raise ConfigError(field_name, f"must be {want!r} with native_host_offload, got {value!r}")
        if self.rules.eager_sample_blocks:
            raise ConfigError("ruleset", f"native_host_offload belongs to ruleset dynamo, got {self.ruleset!r}")
        if self.kv_cache_bytes_per_token is None:
            raise ConfigError("kv_cache_bytes_per_token", "is required by native_host_offload")
        block_bytes = self.tokens_per_block * self.kv_cache_bytes_per_token
        if block_bytes * offload.num_host_blocks > _MAX_U64:
            raise ConfigError(
                "native_host_offload.num_host_blocks",
                "num_host_blocks * block_size * kv_cache_bytes_per_token overflows 64 bits, "
                f"got {offload.num_host_blocks}",
            )
        for field_name in ("d2h_bandwidth_gbps", "h2d_bandwidth_gbps"):
            gbps = getattr(offload, field_name)
            if gbps and not math.isfinite(block_bytes * offload.num_host_blocks / (gbps * 1e6)):
                raise ConfigError(
                    f"native_host_offload.{field_name}", f"the time of a full transfer is not finite, got {gbps}"
                )

    def _check_tiers(self) -> None:
        tiers = self.kvbm_tiers
        if tiers is None:
            return
        if not isinstance(tiers, KvbmTiers):
            raise ConfigError("kvbm_tiers", f"expected a KvbmTiers, got {tiers!r}")
        if self.native_host_offload is not None:
            raise ConfigError("kvbm_tiers", "native_host_offload is given too; they are alternatives")
        for field_name, want in (("backend", "vllm"), ("enable_prefix_caching", True)):
            value = getattr(self, field_name)
            if value != want:
                raise ConfigError(field_name, f"must be {want!r} with kvbm_tiers, got {value!r}")
        if self.kv_cache_bytes_per_token is None:
            return
        block_bytes = self.tokens_per_block * self.kv_cache_bytes_per_token
        for field_name in ("num_g2_blocks", "num_g3_blocks"):
            blocks = getattr(tiers, field_name)
            if block_bytes * max(blocks, self.num_gpu_blocks) > _MAX_U64:
                raise ConfigError(
                    f"kvbm_tiers.{field_name}",
                    f"{field_name} * block_size * kv_cache_bytes_per_token overflows 64 bits, got {blocks}",
                )
        most = block_bytes * max(tiers.num_g2_blocks, self.num_gpu_blocks)
        for field_name in TIER_BANDWIDTHS:
            gbps = getattr(tiers, field_name)
            if gbps > 0 and not (gbps * 1e6 > 0 and math.isfinite(most / (gbps * 1e6))):
                raise ConfigError(f"kvbm_tiers.{field_name}", f"the time of a full transfer is not finite, got {gbps}")

    @property
    def tiers_attached(self) -> KvbmTiers | None:
        """The KVBM tiers that a rank gets: `kvbm_tiers` if the size of a block is known, else None."""
        return None if self.kv_cache_bytes_per_token is None else self.kvbm_tiers

    @property
    def tokens_per_block(self) -> int:
        """`block_size` as an int (it is always resolved after construction)."""
        assert not isinstance(self.block_size, UnsetType)
        return self.block_size

    @property
    def rules(self) -> Ruleset:
        """The rule set named by `ruleset`."""
        return get_ruleset(self.ruleset)

    @property
    def accept_rates(self) -> tuple[float, ...]:
        """Conditional acceptance rate of each draft, `aic_nextn` values; empty without speculation."""
        if self.aic_nextn is None:
            return ()
        return parse_accept_rates(self.aic_nextn_accept_rates, self.aic_nextn)

    @classmethod
    def for_backend(cls, backend: Backend, **fields: Any) -> EngineConfig:
        """Configuration of `backend` with that backend's defaults."""
        return cls(backend=backend, **fields)

    def replace(self, **fields: Any) -> EngineConfig:
        """Copy with some fields changed, validated again."""
        unknown = set(fields) - set(self.__struct_fields__)
        if unknown:
            raise ConfigError(sorted(unknown)[0], "unknown field")
        return EngineConfig(**{**{name: getattr(self, name) for name in self.__struct_fields__}, **fields})

    def for_attention_dp(self, dp_size: int) -> EngineConfig:
        """The configuration of each rank of a group of `dp_size` (spec/replay.md section 1).

        SGLang divides the chunk among the ranks and admits more freely. A share
        is whole pages, at least one: any other would leave prompts waiting for ever.
        """
        if self.backend != "sglang" or dp_size == 1:
            return self
        page, whole = self.tokens_per_block, self.sglang
        return self.replace(
            sglang=msgspec.structs.replace(
                whole,
                chunked_prefill_size=max(page, whole.chunked_prefill_size // dp_size // page * page),
                schedule_conservativeness=whole.schedule_conservativeness * 0.3,
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON or YAML; `parse_config` reads them back."""
        result: dict[str, Any] = msgspec.to_builtins(self)
        return result


# ---------------------------------------------------------------- checks of one field


def _integer(owner: Any, name: str, low: int, high: int = _MAX_I32, *, optional: bool = False, at: str = "") -> None:
    value = getattr(owner, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(at + name, f"expected an integer, got {value!r}")
    if not low <= value <= high:
        raise ConfigError(at + name, f"must lie in {low} <= {name} <= {high}, got {value}")


def _number(owner: Any, name: str, *, optional: bool = False, signed: bool = False, at: str = "") -> None:
    value = getattr(owner, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(at + name, f"expected a number, got {value!r}")
    if not math.isfinite(value) or (value < 0 and not signed):
        raise ConfigError(at + name, f"must be finite{'' if signed else ' and >= 0'}, got {value}")


def _boolean(owner: Any, name: str, *, at: str = "") -> None:
    value = getattr(owner, name)
    if not isinstance(value, bool):
        raise ConfigError(at + name, f"expected true or false, got {value!r}")


def _choice(owner: Any, name: str, allowed: tuple[str, ...], *, at: str = "") -> None:
    value = getattr(owner, name)
    if value not in allowed:
        raise ConfigError(at + name, f"must be one of {', '.join(allowed)}, got {value!r}")


def parse_accept_rates(text: str | None, nextn: int) -> tuple[float, ...]:
    """Conditional acceptance rates, padded with 0 or cut to `nextn` values (vllm.md section 1).

    Raises
    ------
    ConfigError
        If an entry is not a finite number in [0, 1].
    """
    name = "aic_nextn_accept_rates"
    if text is not None and not isinstance(text, str):
        raise ConfigError(name, f"expected a comma list of numbers, got {text!r}")
    rates = []
    for part in (text if text and text.strip() else DEFAULT_ACCEPT_RATES).split(","):
        try:
            rate = float(part)
        except ValueError:
            raise ConfigError(name, f"expected a comma list of numbers, got {text!r}") from None
        if not 0.0 <= rate <= 1.0:
            raise ConfigError(name, f"each rate must lie in [0, 1], got {part.strip()}")
        rates.append(rate)
    return tuple((rates + [0.0] * nextn)[:nextn])


# ---------------------------------------------------------------- reading


def parse_config(values: Mapping[str, Any]) -> EngineConfig:
    """Configuration from plain values (a decoded JSON or YAML document).

    Parameters
    ----------
    values : mapping
        Keys are the fields of `EngineConfig`, and the alias `kv_bytes_per_token`.

    Raises
    ------
    ConfigError
        Unknown key, wrong type, value out of range: names the field.
    """
    if not isinstance(values, Mapping):
        raise ConfigError("", f"expected a mapping of fields, got {type(values).__name__}")
    plain = dict(values)
    if "kv_bytes_per_token" in plain:
        if "kv_transfer_bytes_per_token" in plain:
            raise ConfigError("kv_bytes_per_token", "duplicate field: kv_transfer_bytes_per_token is given too")
        plain["kv_transfer_bytes_per_token"] = plain.pop("kv_bytes_per_token")
    if plain.get("num_gpu_blocks", 0) is None:
        raise ConfigError("num_gpu_blocks", "null is not a number of blocks; omit the key for the default")
    if plain.get("block_size", 0) is None:
        raise ConfigError("block_size", "null is not a block size; omit the key for the default")
    try:
        return msgspec.convert(plain, EngineConfig)
    except msgspec.ValidationError as error:
        # A ConfigError raised in a constructor is the cause, and says more.
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise _config_error(str(error), plain) from None


def _config_error(text: str, values: Mapping[str, Any]) -> ConfigError:
    """ConfigError out of msgspec's `message - at `$.path``."""
    message, _, path = text.partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    if message.startswith("Object contains unknown field"):
        key = message.split("`")[1]
        return ConfigError(f"{field}.{key}" if field else key, "unknown field")
    if message.startswith("Object missing required field"):
        key = message.split("`")[1]
        return ConfigError(f"{field}.{key}" if field else key, "required field is missing")
    value: Any = values
    for part in field.split(".") if field else ():
        value = value.get(part) if isinstance(value, Mapping) else None
    message = message[0].lower() + message[1:]
    return ConfigError(field, f"{message} (value {value!r})" if field else message)


def load_config(path: str | Path, *, overrides: Mapping[str, Any] | None = None) -> EngineConfig:
    """Configuration from a YAML or JSON file.

    Parameters
    ----------
    path : str or Path
        ``.json`` is read as JSON, anything else as YAML.
    overrides : mapping, optional
        Dotted path -> value, applied over the file.

    Raises
    ------
    ConfigError
        Unreadable file, not a mapping, or a bad field.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("", f"{path}: cannot be read: {error}") from None
    decode: Callable[[str], Any]
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.yaml.decode
    try:
        values = decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError("", f"{path}: not valid {'JSON' if path.suffix == '.json' else 'YAML'}: {error}") from None
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise ConfigError("", f"{path}: expected a mapping of fields, got {type(values).__name__}")
    return parse_config(apply_overrides(values, overrides or {}))


def apply_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of nested `values` with dotted paths set; intermediate mappings are made."""
    result: dict[str, Any] = dict(values)
    for path, value in overrides.items():
        keys = path.split(".")
        level = result
        for depth, key in enumerate(keys[:-1]):
            inner = level.get(key)
            if inner is not None and not isinstance(inner, Mapping):
                raise ConfigError(path, f"{'.'.join(keys[: depth + 1])} is not a group of fields")
            level[key] = dict(inner or {})
            level = level[key]
        level[keys[-1]] = value
    return result
