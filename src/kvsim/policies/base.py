"""What a scheduling policy is: data for the kernels, and hooks they call only if you write them.

A policy says what it wants as a :class:`Directive`. What it must decide by
code it decides in one of four hooks; which of them a class overrides is looked
up once, when a rank is built:

===== ============================ ============================================
level you write                    it is called
===== ============================ ============================================
0     ``directive(config)``        once
1     ``score(request)``           per arrival; the kernel orders by it
2     ``order(waiting)``           before admissions, with two or more waiting
2     ``victims(running)``         per preemption
3     ``admit(request, pool)``     per admission that the built-in gate was asked
===== ============================ ============================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from kvsim.config import EngineConfig
from kvsim.errors import ConfigError

__all__ = ["Directive", "Policy", "PoolView", "get_policy", "register_policy"]


@dataclass(frozen=True, slots=True)
class Directive:
    """What a policy wants, as data.

    Attributes
    ----------
    reserve_to_completion : bool
        Admission needs room for the prompt and all outputs; else for the known tokens.
    may_preempt : bool
        A running request may be preempted for another's growth.
    oldest_victim : bool
        The victim is the first running request; else the last.
    recompute_last_token : bool
        A full prefix hit computes the last block again, to obtain logits.
    giveback_blocks : int
        Cached blocks computed again for the drafter of speculative decoding.
    always_draft : bool
        Every pass drafts, without token budget; else drafts are left by an emission.
    first_token_is_decode : bool
        A prompt-completing request counts in the decode duration.
    limit_model_len : bool
        `max_model_len` applies.
    longest_prefix_first : bool
        SGLang: waiting requests are ordered by what the cache holds of them.
    init_new_token_ratio, min_new_token_ratio, new_token_ratio_decay : float
        SGLang: share of the outputs of running requests that admission reserves,
        at the start, at least, and what a pass without prefill takes off.
    """

    reserve_to_completion: bool = False
    may_preempt: bool = True
    oldest_victim: bool = False
    recompute_last_token: bool = True
    giveback_blocks: int = 0
    always_draft: bool = False
    first_token_is_decode: bool = False
    limit_model_len: bool = True
    longest_prefix_first: bool = False
    init_new_token_ratio: float = 0.0
    min_new_token_ratio: float = 0.0
    new_token_ratio_decay: float = 0.0


class PoolView(NamedTuple):
    """Blocks of the pool by state, for the admission hook."""

    active: int
    inactive: int
    free: int
    total: int


class Policy:
    """Base of scheduling policies; the defaults of all hooks mean "the kernel does it".

    Hooks get copies of rows of dtype `kvsim.layout.REQUEST`: they cannot change
    the rank. What they raise ends the pass and poisons the rank.
    """

    #: Name under which `get_policy` finds the class.
    name: ClassVar[str] = ""

    def directive(self, config: EngineConfig) -> Directive:
        """What this policy wants under `config`."""
        raise NotImplementedError

    def score(self, request: np.void) -> float:
        """Place in the queue: smaller goes first, equal scores keep arrival order. Called once, at arrival.

        Preempted requests go to the front whatever their score.
        """
        raise NotImplementedError

    def order(self, waiting: npt.NDArray[Any]) -> npt.NDArray[np.integer[Any]]:
        """Order of the waiting requests for this pass.

        Parameters
        ----------
        waiting : ndarray of layout.REQUEST, shape (n,)
            In queue order, n >= 2.

        Returns
        -------
        ndarray of int, shape (n,)
            A permutation of 0..n-1; the first is tried first, and blocks the rest if it does not fit.
        """
        raise NotImplementedError

    def victims(self, running: npt.NDArray[Any]) -> npt.NDArray[np.integer[Any]]:
        """Whom to preempt.

        Parameters
        ----------
        running : ndarray of layout.REQUEST, shape (n,)
            In running order.

        Returns
        -------
        ndarray of int
            Positions in `running`, best victim first; only the first is taken. Empty: nobody.
        """
        raise NotImplementedError

    def admit(self, request: np.void, pool: tuple[int, int, int, int]) -> bool:
        """Whether the request at the head enters now, in place of the built-in gate.

        Parameters
        ----------
        request : numpy.void of layout.REQUEST
        pool : tuple
            As `PoolView`.
        """
        raise NotImplementedError

    def overrides(self, hook: str) -> bool:
        """Whether this class or object has a hook of its own."""
        return getattr(type(self), hook) is not getattr(Policy, hook)


_REGISTRY: dict[str, type[Policy]] = {}


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Class decorator: make a policy available by its `name`."""
    if not policy.name:
        raise ConfigError("policy", f"{policy.__name__} has no name")
    _REGISTRY[policy.name] = policy
    return policy


def get_policy(name: str) -> Policy:
    """New policy object by name.

    Raises
    ------
    ConfigError
        If none is registered under it.
    """
    if name not in _REGISTRY:
        raise ConfigError("policy", f"must be one of {', '.join(sorted(_REGISTRY))}, got {name!r}")
    return _REGISTRY[name]()
