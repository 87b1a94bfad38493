"""Scheduling policies: one policy, one file."""

from kvsim.policies.base import Directive, Policy, PoolView, get_policy, register_policy
from kvsim.policies.sglang import SglangPolicy
from kvsim.policies.trtllm import TrtllmPolicy
from kvsim.policies.vllm import VllmPolicy

__all__ = [
    "Directive",
    "Policy",
    "PoolView",
    "SglangPolicy",
    "TrtllmPolicy",
    "VllmPolicy",
    "get_policy",
    "register_policy",
]
