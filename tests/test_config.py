"""Configuration: every rule has a case, and every error names the field, the value and what is allowed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvsim.config import (
    EngineConfig,
    ExternalTiming,
    FixedTiming,
    NativeHostOffload,
    NpzTiming,
    PolynomialTiming,
    SglangConfig,
    TrtllmConfig,
    apply_overrides,
    load_config,
    parse_accept_rates,
    parse_config,
)
from kvsim.errors import ConfigError, KvsimError
from kvsim.rulesets import RULESETS, get_ruleset

OFFLOAD = {"native_host_offload": {"num_host_blocks": 4}, "kv_cache_bytes_per_token": 1000}


def test_defaults_are_those_of_the_specification() -> None:
    config = EngineConfig()
    assert (config.backend, config.ruleset) == ("vllm", "dynamo")
    assert (config.num_gpu_blocks, config.block_size, config.max_num_seqs) == (16384, 64, 256)
    assert (config.max_num_batched_tokens, config.max_model_len) == (8192, None)
    assert config.enable_prefix_caching
    assert config.enable_chunked_prefill
    assert (config.speedup_ratio, config.decode_speedup_ratio) == (1.0, 1.0)
    assert (config.aic_nextn, config.aic_nextn_accept_rates, config.aic_mtp_seed) == (None, None, 42)
    assert (config.worker_type, config.preemption_mode) == ("aggregated", "lifo")
    assert not config.emit_kv_events
    assert not config.emit_kv_token_ids
    assert config.timing_model == PolynomialTiming()
    assert config.kv_transfer_timing_mode == "full_prompt"
    assert config.sglang == SglangConfig(
        schedule_policy="fifo",
        max_prefill_tokens=16384,
        chunked_prefill_size=8192,
        clip_max_new_tokens=4096,
        schedule_conservativeness=1.0,
    )
    assert config.accept_rates == ()


@pytest.mark.parametrize(("backend", "size"), [("vllm", 64), ("sglang", 1), ("trtllm", 32)])
def test_the_block_size_depends_on_the_backend_when_omitted(backend: Any, size: int) -> None:
    assert parse_config({"backend": backend}).tokens_per_block == size
    assert EngineConfig.for_backend(backend).block_size == size
    assert EngineConfig.for_backend(backend, block_size=16).tokens_per_block == 16


#: values -> (field the error names, further words of the message)
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    # unknown keys, at every depth
    "unknown key": ({"num_gpu_block": 3}, "num_gpu_block", "unknown field"),
    "unknown key of timing": (
        {"timing_model": {"type": "fixed", "prefill_ms": 1, "decode_ms": 1, "x": 1}},
        "timing_model.x",
        "unknown field",
    ),
    "unknown key of sglang": ({"sglang": {"page_size": 4}}, "sglang.page_size", "unknown field"),
    "unknown key of trtllm": ({"trtllm": {"x": 4}}, "trtllm.x", "unknown field"),
    "unknown key of offload": (
        {"native_host_offload": {"num_host_blocks": 1, "blocks": 1}},
        "native_host_offload.blocks",
        "unknown field",
    ),
    # enumerations
    "backend": ({"backend": "tgi"}, "backend", "tgi"),
    "ruleset": ({"ruleset": "dynamo-9"}, "ruleset", "must be one of dynamo, dynamo-1.3, got 'dynamo-9'"),
    "worker_type": ({"worker_type": "both"}, "worker_type", "both"),
    "preemption_mode": ({"preemption_mode": "random"}, "preemption_mode", "random"),
    "kv_transfer_timing_mode": ({"kv_transfer_timing_mode": "none"}, "kv_transfer_timing_mode", "none"),
    "schedule_policy": ({"sglang": {"schedule_policy": "lifo"}}, "sglang.schedule_policy", "lifo"),
    "capacity policy": (
        {"trtllm": {"capacity_scheduler_policy": "max_utilization"}},
        "trtllm.capacity_scheduler_policy",
        "max_utilization",
    ),
    "timing type": ({"timing_model": {"type": "oracle"}}, "timing_model.type", "oracle"),
    # geometry
    "no blocks": ({"num_gpu_blocks": 0}, "num_gpu_blocks", "1 <= num_gpu_blocks <= 2147483647, got 0"),
    "too many blocks": ({"num_gpu_blocks": 2**31}, "num_gpu_blocks", "got 2147483648"),
    "blocks null": ({"num_gpu_blocks": None}, "num_gpu_blocks", "null"),
    "blocks a bool": ({"num_gpu_blocks": True}, "num_gpu_blocks", "True"),
    "blocks a float": ({"num_gpu_blocks": 1.5}, "num_gpu_blocks", "1.5"),
    "blocks a string": ({"num_gpu_blocks": "4"}, "num_gpu_blocks", "'4'"),
    "block size of vllm": ({"block_size": 1}, "block_size", "2 <= block_size <= 2147483647, got 1"),
    "block size of trtllm": ({"backend": "trtllm", "block_size": 1}, "block_size", "got 1"),
    "block size of sglang": ({"backend": "sglang", "block_size": 0}, "block_size", "got 0"),
    "block size null": ({"block_size": None}, "block_size", "null"),
    # limits
    "model length": ({"max_model_len": 0}, "max_model_len", "got 0"),
    "running cap": ({"max_num_seqs": 0}, "max_num_seqs", "got 0"),
    "running cap a bool": ({"max_num_seqs": True}, "max_num_seqs", "True"),
    "budget": ({"max_num_batched_tokens": -1}, "max_num_batched_tokens", "got -1"),
    "caching no bool": ({"enable_prefix_caching": 1}, "enable_prefix_caching", "1"),
    "chunking no bool": ({"enable_chunked_prefill": "yes"}, "enable_chunked_prefill", "'yes'"),
    # ratios
    "speedup negative": ({"speedup_ratio": -0.5}, "speedup_ratio", "must be finite and >= 0, got -0.5"),
    "speedup nan": ({"speedup_ratio": math.nan}, "speedup_ratio", "got nan"),
    "speedup infinite": ({"speedup_ratio": math.inf}, "speedup_ratio", "got inf"),
    "speedup a string": ({"speedup_ratio": "2"}, "speedup_ratio", "'2'"),
    "speedup a bool": ({"speedup_ratio": True}, "speedup_ratio", "True"),
    "decode speedup": ({"decode_speedup_ratio": -1}, "decode_speedup_ratio", "got -1"),
    # speculation
    "no drafts": ({"aic_nextn": 0}, "aic_nextn", "1 <= aic_nextn <= 64, got 0"),
    "too many drafts": ({"aic_nextn": 65}, "aic_nextn", "got 65"),
    "too many drafts for 1.3": ({"ruleset": "dynamo-1.3", "aic_nextn": 6}, "aic_nextn", "1 <= aic_nextn <= 5, got 6"),
    "rates alone": ({"aic_nextn_accept_rates": "1"}, "aic_nextn_accept_rates", "requires aic_nextn"),
    "rate above one": (
        {"aic_nextn": 2, "aic_nextn_accept_rates": "0.5,1.5"},
        "aic_nextn_accept_rates",
        r"each rate must lie in \[0, 1\], got 1.5",
    ),
    "rate negative": ({"aic_nextn": 1, "aic_nextn_accept_rates": "-0.1"}, "aic_nextn_accept_rates", "got -0.1"),
    "rate nan": ({"aic_nextn": 1, "aic_nextn_accept_rates": "nan"}, "aic_nextn_accept_rates", "got nan"),
    "rate beyond the drafts": (
        {"aic_nextn": 1, "aic_nextn_accept_rates": "0.5,7"},
        "aic_nextn_accept_rates",
        "got 7",
    ),
    "rates no numbers": (
        {"aic_nextn": 1, "aic_nextn_accept_rates": "0.5,"},
        "aic_nextn_accept_rates",
        "expected a comma list of numbers, got '0.5,'",
    ),
    "rates a list": ({"aic_nextn": 1, "aic_nextn_accept_rates": [1]}, "aic_nextn_accept_rates", r"\[1\]"),
    "drafts with a decode speedup": (
        {"aic_nextn": 1, "decode_speedup_ratio": 2},
        "decode_speedup_ratio",
        "must be 1.0 when aic_nextn is set, got 2",
    ),
    "seed negative": ({"aic_mtp_seed": -1}, "aic_mtp_seed", "got -1"),
    "seed of 65 bits": ({"aic_mtp_seed": 2**64}, "aic_mtp_seed", "18446744073709551616"),
    # backends
    "sglang unchunked": ({"backend": "sglang", "enable_chunked_prefill": False}, "enable_chunked_prefill", "sglang"),
    "sglang chunk off the page": (
        {"backend": "sglang", "block_size": 16, "sglang": {"chunked_prefill_size": 24}},
        "sglang.chunked_prefill_size",
        "must be a multiple of block_size 16, got 24",
    ),
    "sglang limit below the page": (
        {"backend": "sglang", "block_size": 16, "sglang": {"max_prefill_tokens": 8}},
        "sglang.max_prefill_tokens",
        "must be at least block_size 16, got 8",
    ),
    "sglang chunk": ({"sglang": {"chunked_prefill_size": 0}}, "sglang.chunked_prefill_size", "got 0"),
    "sglang limit": ({"sglang": {"max_prefill_tokens": 0}}, "sglang.max_prefill_tokens", "got 0"),
    "sglang clip": ({"sglang": {"clip_max_new_tokens": -1}}, "sglang.clip_max_new_tokens", "got -1"),
    "sglang conservativeness": (
        {"sglang": {"schedule_conservativeness": -1}},
        "sglang.schedule_conservativeness",
        "got -1",
    ),
    "sglang no object": ({"sglang": 3}, "sglang", "3"),
    # events and bytes
    "token ids without events": ({"emit_kv_token_ids": True}, "emit_kv_token_ids", "requires emit_kv_events"),
    "transfer bytes": ({"kv_transfer_bytes_per_token": 0}, "kv_transfer_bytes_per_token", "got 0"),
    "cache bytes": ({"kv_cache_bytes_per_token": 0}, "kv_cache_bytes_per_token", "got 0"),
    "both names of transfer bytes": (
        {"kv_transfer_bytes_per_token": 1, "kv_bytes_per_token": 1},
        "kv_bytes_per_token",
        "duplicate field",
    ),
    "bandwidth": ({"kv_transfer_bandwidth": -1}, "kv_transfer_bandwidth", "got -1"),
    "bandwidth nan": ({"kv_transfer_bandwidth": math.nan}, "kv_transfer_bandwidth", "got nan"),
    # host offload
    "offload without blocks": (
        {"native_host_offload": {}},
        "native_host_offload.num_host_blocks",
        "required field is missing",
    ),
    "offload of nothing": (
        OFFLOAD | {"native_host_offload": {"num_host_blocks": 0}},
        "native_host_offload.num_host_blocks",
        "got 0",
    ),
    "offload bandwidth": (
        OFFLOAD | {"native_host_offload": {"num_host_blocks": 1, "h2d_bandwidth_gbps": -1}},
        "native_host_offload.h2d_bandwidth_gbps",
        "got -1",
    ),
    "offload on trtllm": (OFFLOAD | {"backend": "trtllm"}, "backend", "must be 'vllm' with native_host_offload"),
    "offload on a decode worker": (OFFLOAD | {"worker_type": "decode"}, "worker_type", "must be 'aggregated'"),
    "offload without caching": (OFFLOAD | {"enable_prefix_caching": False}, "enable_prefix_caching", "must be True"),
    "offload with drafts": (OFFLOAD | {"aic_nextn": 1}, "aic_nextn", "must be None with native_host_offload, got 1"),
    "offload without bytes": (
        {"native_host_offload": {"num_host_blocks": 4}},
        "kv_cache_bytes_per_token",
        "is required by native_host_offload",
    ),
    "offload overflow": (
        {"native_host_offload": {"num_host_blocks": 2**40}, "kv_cache_bytes_per_token": 2**30},
        "native_host_offload.num_host_blocks",
        "overflows 64 bits",
    ),
    "offload time": (
        OFFLOAD | {"native_host_offload": {"num_host_blocks": 4, "d2h_bandwidth_gbps": 1e-310}},
        "native_host_offload.d2h_bandwidth_gbps",
        "not finite",
    ),
    # timing
    "fixed without decode": (
        {"timing_model": {"type": "fixed", "prefill_ms": 1}},
        "timing_model.decode_ms",
        "required field is missing",
    ),
    "fixed negative": (
        {"timing_model": {"type": "fixed", "prefill_ms": -1, "decode_ms": 1}},
        "timing_model.prefill_ms",
        "must be finite and >= 0, got -1",
    ),
    "fixed nan": (
        {"timing_model": {"type": "fixed", "prefill_ms": 1, "decode_ms": math.nan}},
        "timing_model.decode_ms",
        "got nan",
    ),
    "npz without a path": ({"timing_model": {"type": "npz", "path": ""}}, "timing_model.path", "got ''"),
    "external blank": ({"timing_model": {"type": "external", "provider": " "}}, "timing_model.provider", "blank"),
    "timing no object": ({"timing_model": 3}, "timing_model", "3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_value_is_refused_by_name(name: str) -> None:
    values, field, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words) as caught:
        parse_config(values)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, KvsimError)


FLAT = [
    name
    for name, (values, field, _) in REFUSED.items()
    if "." not in field
    and not any(isinstance(value, dict) for value in values.values())
    and "null" not in name
    and not name.startswith(("unknown", "both names"))
]


@pytest.mark.parametrize("name", FLAT)
def test_the_constructor_checks_what_the_parser_checks(name: str) -> None:
    values, field, _ = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**values)
    assert caught.value.field == field


ACCEPTED: dict[str, dict[str, Any]] = {
    "one block of two": {"num_gpu_blocks": 1, "block_size": 2},
    "sglang of pages of one": {"backend": "sglang", "block_size": 1},
    "no limits": {"max_num_seqs": None, "max_num_batched_tokens": None, "max_model_len": None},
    "ratio zero": {"speedup_ratio": 0, "decode_speedup_ratio": 0.0},
    "drafts": {"aic_nextn": 64, "aic_nextn_accept_rates": "1"},
    "drafts of 1.3": {"ruleset": "dynamo-1.3", "aic_nextn": 5},
    "drafts with a ratio of one": {"aic_nextn": 2, "decode_speedup_ratio": 1},
    "largest seed": {"aic_mtp_seed": 2**64 - 1},
    "no bandwidth": {"kv_transfer_bandwidth": 0},
    "offload": OFFLOAD,
    "instant offload": OFFLOAD | {"native_host_offload": {"num_host_blocks": 1, "d2h_bandwidth_gbps": 0}},
    "sglang options on vllm": {"block_size": 64, "sglang": {"chunked_prefill_size": 10}},
    "external": {"timing_model": {"type": "external", "provider": "mine", "config": {"a": [1]}}},
    "npz": {"timing_model": {"type": "npz", "path": "profile.npz"}},
    "fixed zero": {"timing_model": {"type": "fixed", "prefill_ms": 0, "decode_ms": 0}},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_allowed_survives_a_round_trip(name: str) -> None:
    config = parse_config(ACCEPTED[name])
    assert parse_config(config.to_dict()) == config
    assert parse_config(json.loads(json.dumps(config.to_dict()))) == config


def test_the_first_failure_in_field_order_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(kv_transfer_bandwidth=-1, num_gpu_blocks=0, speedup_ratio=-1)
    assert caught.value.field == "num_gpu_blocks"


def test_the_old_name_of_transfer_bytes_is_read_and_the_new_one_written() -> None:
    config = parse_config({"kv_bytes_per_token": 512})
    assert config.kv_transfer_bytes_per_token == 512
    assert config.to_dict()["kv_transfer_bytes_per_token"] == 512
    assert "kv_bytes_per_token" not in config.to_dict()


@pytest.mark.parametrize(
    ("text", "nextn", "rates"),
    [
        (None, 3, (0.85, 0.3, 0.0)),
        (None, 7, (0.85, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0)),
        ("1", 3, (1.0, 0.0, 0.0)),
        ("0.5, 0.25,1", 2, (0.5, 0.25)),
        ("", 1, (0.85,)),
    ],
)
def test_rates_are_padded_with_zero_or_cut(text: str | None, nextn: int, rates: tuple[float, ...]) -> None:
    assert parse_accept_rates(text, nextn) == rates
    assert EngineConfig(aic_nextn=nextn, aic_nextn_accept_rates=text).accept_rates == rates


def test_a_configuration_is_immutable_and_replaced_with_checks() -> None:
    config = EngineConfig()
    with pytest.raises(AttributeError):
        config.num_gpu_blocks = 3  # type: ignore[misc]
    assert config.replace(num_gpu_blocks=3).num_gpu_blocks == 3
    assert config.num_gpu_blocks == 16384
    with pytest.raises(ConfigError, match="num_gpu_blocks: must lie in"):
        config.replace(num_gpu_blocks=0)
    with pytest.raises(ConfigError, match="blocks: unknown field"):
        config.replace(blocks=3)


def test_nested_objects_can_be_given_as_objects() -> None:
    config = EngineConfig(
        timing_model=FixedTiming(prefill_ms=1, decode_ms=2),
        native_host_offload=NativeHostOffload(num_host_blocks=3),
        kv_cache_bytes_per_token=7,
        trtllm=TrtllmConfig(),
    )
    assert parse_config(config.to_dict()) == config
    for field, value in (("timing_model", 3), ("sglang", TrtllmConfig()), ("native_host_offload", 3)):
        with pytest.raises(ConfigError) as caught:
            EngineConfig(**{field: value})
        assert caught.value.field == field


@pytest.mark.parametrize("model", [NpzTiming(path="p.npz"), ExternalTiming(provider="x"), PolynomialTiming()])
def test_every_timing_model_names_its_type(model: Any) -> None:
    plain = msgspec.to_builtins(EngineConfig(timing_model=model))["timing_model"]
    assert parse_config({"timing_model": plain}).timing_model == model
    assert plain["type"] in ("npz", "external", "polynomial")


# ---------------------------------------------------------------- files


def test_yaml_and_json_files_mean_the_same(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("num_gpu_blocks: 12\ntiming_model: {type: fixed, prefill_ms: 3, decode_ms: 1}\n")
    (tmp_path / "c.json").write_text(
        '{"num_gpu_blocks": 12, "timing_model": {"type": "fixed", "prefill_ms": 3, "decode_ms": 1}}'
    )
    assert load_config(tmp_path / "c.yaml") == load_config(tmp_path / "c.json")
    (tmp_path / "empty.yaml").write_text("")
    assert load_config(tmp_path / "empty.yaml") == EngineConfig()


def test_overrides_reach_into_groups(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("sglang: {clip_max_new_tokens: 7}\n")
    config = load_config(path, overrides={"sglang.max_prefill_tokens": 99, "max_num_seqs": 2})
    assert (config.sglang.clip_max_new_tokens, config.sglang.max_prefill_tokens, config.max_num_seqs) == (7, 99, 2)
    with pytest.raises(ConfigError, match=r"sglang.nope: unknown field"):
        load_config(path, overrides={"sglang.nope": 1})


def test_overrides_leave_their_source_alone_and_refuse_to_enter_a_value() -> None:
    values = {"a": {"b": 1}, "c": 2}
    assert apply_overrides(values, {"a.b": 3, "d.e": 4}) == {"a": {"b": 3}, "c": 2, "d": {"e": 4}}
    assert values == {"a": {"b": 1}, "c": 2}
    with pytest.raises(ConfigError, match="c is not a group of fields"):
        apply_overrides(values, {"c.x": 1})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.json", "{", "not valid JSON"),
        ("c.yaml", "a: [", "not valid YAML"),
        ("c.yaml", "- 1\n", "expected a mapping of fields, got list"),
        ("c.json", "3", "expected a mapping of fields, got int"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(tmp_path / name)
    assert name in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.yaml: cannot be read"):
        load_config(tmp_path / "missing.yaml")


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a mapping of fields, got list"):
        parse_config([])  # type: ignore[arg-type]


# ---------------------------------------------------------------- rule sets


def test_rule_sets_are_found_by_name_only() -> None:
    assert set(RULESETS) >= {"dynamo", "dynamo-1.3"}
    for name, rules in RULESETS.items():
        assert get_ruleset(name) is rules
        assert rules.name == name
        assert EngineConfig(ruleset=name).rules is rules
    for bad in ("", "DYNAMO", None, 3, []):
        with pytest.raises(ConfigError, match=r"ruleset: must be one of dynamo, dynamo-1\.3"):
            get_ruleset(bad)  # type: ignore[arg-type]
