"""`smp.state`: ranks, groups, and the wrapped model and optimizer. One object per process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smddp.modelparallel.ranks import Ranks
    from smddp.smp.v1_keys import Config


class ModuleManager:
    """Interface that transformers needs to save a model; empty, as modules keep their names and shapes."""

    def __init__(self) -> None:
        self.translate_functions: list[Any] = []


class State:
    """Ranks, model and optimizer of this process.

    Attributes:
        cfg: the configuration; None before `init`.
        ranks: this process's place and groups; None before `init`.
        model: the script's DistributedModel, or None.
        optimizer: the script's DistributedOptimizer, or None.
        module_manager: see `ModuleManager`.
    """

    def __init__(self) -> None:
        self.cfg: Config | None = None
        self.ranks: Ranks | None = None
        self.model: Any = None
        self.optimizer: Any = None
        self.module_manager: Any = ModuleManager()
        self._at_reset: list[Any] = []

    @property
    def initialized(self) -> bool:
        """Return True after `init`."""
        return self.cfg is not None

    @property
    def script_optimizer(self) -> Any:
        """Optimizer object of the script, returned by `smp.DistributedOptimizer()`."""
        return None if self.optimizer is None else self.optimizer.script

    @property
    def param_index_to_name_tp_group(self) -> list[dict[int, str]]:
        """For each rank of the tensor group, its parameters' names by number in the optimizer."""
        return self._of_tensor_group("param_index_to_name_tp_group", "names")

    @property
    def param_name_to_index_tp_group(self) -> list[dict[str, int]]:
        """For each rank of the tensor group, its parameters' numbers in the optimizer by name."""
        return self._of_tensor_group("param_name_to_index_tp_group", "param_name_to_index")

    def _of_tensor_group(self, name: str, method: str) -> list[Any]:
        _, ranks = self.made(f"state.{name}")
        if self.optimizer is None:
            raise RuntimeError(f"smp.state.{name} on rank {ranks.rank}: make the smp.DistributedOptimizer() first")
        return [getattr(self.optimizer, method)() for _ in range(ranks.tp_size)]

    def made(self, what: str) -> tuple[Config, Ranks]:
        """Return the configuration and the ranks. Raises RuntimeError with ``what`` before `init`."""
        if self.cfg is None or self.ranks is None:
            raise RuntimeError(f"smp.{what} needs smp.init() first")
        return self.cfg, self.ranks

    def at_reset(self, undo: Any) -> None:
        """Register ``undo()`` for the next `reset`, which runs the last one first."""
        self._at_reset.append(undo)

    def reset(self) -> None:
        """Clear the state and undo the changes of `init` in torch. Process groups remain until torch destroys them."""
        while self._at_reset:
            self._at_reset.pop()()
        self.cfg = self.ranks = self.model = self.optimizer = None
        self.module_manager = ModuleManager()


state = State()
