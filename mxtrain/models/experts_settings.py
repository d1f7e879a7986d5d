"""Settings of mixtures of experts; importable without mxnet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from mxtrain.errors import UserError

_BALANCE, _Z = 0.01, 0.001


@dataclass
class ExpertsConfig:
    """Experts in place of the hidden layers of a network's blocks. The tokens of a shard are routed together."""

    experts: int = 0
    """Hidden layers that a router chooses among, token by token, in the blocks that have experts; 0: all are dense."""
    routing: Literal["top1", "top2", "expert-choice"] = "top1"
    """Who chooses: each token its best expert (top1: Switch) or its two best (top2: GShard), or each expert the tokens
    that suit it best (expert-choice)."""
    capacity_factor: float = 1.25
    """An expert has room for this many times its even share of the shard's tokens (twice that for top2); a token that
    finds no room passes by. With expert-choice, experts take just so many. In hundredths."""
    expert_every: int = 2
    """Every so many blocks is one with experts: 2 is the second, the fourth, ..., 1 is all."""
    balance_weight: float = _BALANCE
    """Weight, in the loss, of what makes the router use all experts alike (top1 and top2)."""
    router_z_weight: float = _Z
    """Weight, in the loss, of what keeps the router's scores small."""
    allow_leak: bool = False
    """Let experts choose in a language model, though each choice depends on tokens that are yet to be foretold."""

    def __post_init__(self):
        if self.experts < 0:
            raise UserError(f"--experts {self.experts}: must be 1 or more, or 0 for none")
        if not self.experts:
            self._refuse_idle()
            return
        if self.experts < choices(self):
            raise UserError(f"--experts {self.experts}: --routing {self.routing} needs {choices(self)} or more")
        if not 0 < self.capacity_factor < math.inf:
            raise UserError(f"--capacity-factor {self.capacity_factor}: must be above 0")
        if (Fraction(str(self.capacity_factor)) * 100).denominator > 1:
            raise UserError(f"--capacity-factor {self.capacity_factor}: must have no more than two decimals")
        if share(self) > 1:
            raise UserError(f"--capacity-factor {self.capacity_factor}: makes room for more tokens than a shard has; "
                            f"{self.experts} experts with {self.routing} take {self.experts / choices(self):g} at most")
        if self.expert_every < 1:
            raise UserError(f"--expert-every {self.expert_every}: must be 1 or more")
        for name in ("balance_weight", "router_z_weight"):
            if not getattr(self, name) >= 0:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be 0 or more")
        if self.routing == "expert-choice" and self.balance_weight != _BALANCE:
            raise UserError(f"--balance-weight {self.balance_weight}: has no effect with --routing expert-choice, "
                            "which is even by itself")
        if self.routing != "expert-choice" and self.allow_leak:
            raise UserError(f"--allow-leak: has no effect with --routing {self.routing}")

    def _refuse_idle(self) -> None:
        for name, field in self.__dataclass_fields__.items():
            if getattr(self, name) != field.default:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: has no effect without --experts")


def in_block(config: ExpertsConfig, number: int) -> bool:
    """Whether a block, counted from 0, has experts."""
    return config.experts > 0 and (number + 1) % config.expert_every == 0


def choices(config: ExpertsConfig) -> int:
    """Experts that a token chooses; 1 where the experts choose."""
    return 2 if config.routing == "top2" else 1


def share(config: ExpertsConfig) -> Fraction:
    """Of n tokens an expert has room for ceil(share * n). The factor counts as it is written: 1.1 is 11/10."""
    return Fraction(str(config.capacity_factor)) * choices(config) / config.experts
