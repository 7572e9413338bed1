"""`DelayedParamIniter`: initialises the parameters and buffers of a meta model, one module at a time."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smddp.sagemaker import dtensor_shards
from smddp.sagemaker.delayed_param import forms, plan, recipe, seeds
from smddp.sagemaker.delayed_param.inventory import Inventory
from smddp.sagemaker.names import some
from smddp.sagemaker.private_names import is_flattened
from smddp.sagemaker.replaced import recording

logger = logging.getLogger("smddp.sagemaker")


class DelayedParamIniter:
    """Initialises a model that was built on the meta device.

    Args:
        model: any transformers model, or any module whose submodules with parameters have ``reset_parameters``.
            Tensor-parallel models (with DTensor parameters) and models under ``fully_shard`` are supported. A model
            without meta tensors is left unchanged, and a log line says so.
        init_method_using_config: ``f(module)``, called instead of the model's initialisation for every module with
            direct parameters. It sets those parameters, not the children's. They are real, uninitialised tensors of
            the full shape.
        verbose: log each module as it is initialised.
        random_seed: seed of the values, combined with parameter names; default: the ``random_seed`` of ``init()``.
        device: device of the values; default: the current accelerator, or the CPU without one or with a mesh on the
            CPU.

    Raises:
        TypeError: ``model`` is not a module, or ``init_method_using_config`` is not callable.
        ValueError: modules with parameters or buffers on meta cannot be initialised; the message names them.
    """

    def __init__(
        self,
        model: nn.Module,
        init_method_using_config: Callable[[nn.Module], object] | None = None,
        verbose: bool = False,
        *,
        random_seed: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"DelayedParamIniter takes a torch.nn.Module, not {type(model).__name__}")
        if init_method_using_config is not None and not callable(init_method_using_config):
            raise TypeError(
                f"init_method_using_config is a function of one module, not {type(init_method_using_config).__name__}"
            )
        self._model = model
        self._custom = init_method_using_config
        self._verbose = verbose
        self._seed = _random_seed() if random_seed is None else int(random_seed)
        self._device = _device(device)
        self._tie()
        self._has = Inventory(model)
        self._recipes, self._rebuilt = plan.sources(self._has, self._seed, custom=init_method_using_config is not None)
        if self._has.empty:
            logger.info("DelayedParamIniter: no parameter of %s is on meta: nothing to do", type(model).__name__)
        self._done: set[int] = set()
        self._calls: Counter[int] = Counter()
        self._buffers_done = False

    # -- what FSDP is given -----------------------------------------------------------------------------------------

    def get_param_init_fn(self) -> Callable[[nn.Module], None]:
        """Returns the ``param_init_fn`` of FSDP: initialises a module's direct parameters, not its children's.

        The first call also gives all buffers of the model their values, since FSDP calls nothing for a unit that has
        buffers alone.
        """
        return self._init_module

    def get_post_param_init_fn(self) -> Callable[[nn.Module], None]:
        """Returns the ``post_param_init_fn`` of FSDP, called with each module after its initialisation.

        Ties the weights that the model ties, by its ``tie_weights``, where initialisation by other means than ours
        untied them. A module without ``tie_weights``, and one whose weights are tied, is left alone.
        """
        return self._after_module

    def materialize(self, model: nn.Module | None = None) -> nn.Module:
        """Initialises all remaining meta tensors: for FSDP2, tensor parallelism without FSDP, and one process.

        Each rank allocates its local shards and, for a moment, the full parameters of one module. ``model``, if given,
        is the model that this object was made for. Also fills a model on which ``to_empty`` was called already.
        Returns the model.
        """
        if model is not None and model is not self._model and not any(m is self._model for m in model.modules()):
            raise ValueError("materialize() takes the model that DelayedParamIniter was made for, or nothing")
        with recording(self._model, "materialize()"):
            for module in self._has.modules.values():
                self._init_module(module)
            for module in self._has.modules.values():
                self._after_module(module)
        return self._model if model is None else model

    def count_num_params(self, module: nn.Module, *args: nn.Module) -> int:
        """Returns the number of parameters (elements) of all given modules.

        Tied parameters count once, and DTensors with their full size; of parameters that FSDP1 has flattened only the
        local part is left to count.
        """
        parameters = {id(p): p for m in (module, *args) for p in m.parameters()}
        return sum(p.numel() for p in parameters.values())

    @contextlib.contextmanager
    def validate_params_and_buffers_inited(self, enabled: bool = True) -> Iterator[None]:
        """Context manager; checks on exit that every parameter was initialised exactly once and is not on meta.

        Raises `RuntimeError` that names what was missed and what was done twice. ``enabled=False`` checks nothing.
        """
        yield
        if enabled:
            self._validate()

    # -- at construction --------------------------------------------------------------------------------------------

    def _tie(self) -> None:
        """Restores ties that construction on meta breaks (accelerate creates a new parameter at every assignment)."""
        parameters = list(self._model.parameters())
        if all(p.is_meta and not isinstance(p, DTensor) for p in parameters):
            for module in self._model.modules():
                tie_weights = getattr(module, "tie_weights", None)
                if recipe.is_pretrained(module) and callable(tie_weights):
                    tie_weights()
                    break

    # -- initialisation ---------------------------------------------------------------------------------------------

    def _init_module(self, module: nn.Module) -> None:
        key = id(module)
        if key not in self._has.modules:
            raise ValueError(
                f"{type(module).__name__} was not in the model given to DelayedParamIniter: make it from the model "
                "after the last change to the model's modules (transform, LoRA), right before FSDP"
            )
        if not self._buffers_done:
            self._buffers_done = True
            with torch.no_grad():
                self._fill_buffers()
        self._calls[key] += 1
        if self._calls[key] > 1:
            return  # the validator reports it; repeating the initialisation would give the same values
        for name in list(module._parameters):
            if (key, name) in self._has.owner:
                owner, original = self._has.owner[key, name]
                self._init_parameters(self._has.modules[owner])
                self._share(key, name, owner, original)

    def _share(self, key: int, name: str, owner: int, original: str) -> None:
        """Sets the owner's current parameter in this module, too."""
        parameter = self._has.modules[owner]._parameters.get(original)
        if parameter is None or is_flattened(parameter):
            raise ValueError(
                f"{self._has.full_name(key, name)} and {self._has.full_name(owner, original)} are tied, but FSDP has "
                "already sharded one without the other: wrap both in one FSDP unit (leave them to the root), or set "
                "tie_word_embeddings=False"
            )
        self._has.modules[key]._parameters[name] = parameter

    @torch.no_grad()
    def _init_parameters(self, module: nn.Module) -> None:
        """Initialises all parameters that ``module`` owns."""
        key = id(module)
        names = [n for n in module._parameters if (key, n) in self._has.holders]
        if not names or key in self._done:
            return
        self._done.add(key)
        if self._verbose:
            logger.info("initialising %s: %s", self._has.names[key] or type(module).__name__, ", ".join(names))
        targets = dict(module._parameters)
        try:
            whole = self._compute(module, {self._has.original[key][name] for name in names})
        finally:
            module._parameters.clear()
            module._parameters.update(targets)
        values = forms.stored_from(module, whole)
        for name in names:
            value, target = values.pop(name).detach(), targets[name]
            assert target is not None  # the inventory lists registered parameters only
            value = dtensor_shards.cut(value, target) if isinstance(target, DTensor) else value
            module._parameters[name] = dtensor_shards.put(value, target)

    def _compute(self, module: nn.Module, names: set[str]) -> dict[str, torch.Tensor]:
        """Returns the full values of the module's direct parameters ``names`` (original names).

        Leaves the module with other parameters than it had.
        """
        key = id(module)
        module._parameters.clear()
        for name, form in self._has.forms[key].items():
            if form is None:
                module._parameters[name] = None
                continue
            fresh = form.empty(self._device if name in names else "meta")
            if name in names and (key, name) in self._rebuilt:
                fresh.copy_(self._rebuilt.pop((key, name)))
            module._parameters[name] = fresh
        if self._custom is not None:
            with seeds.seeded(self._device, self._seed, self._has.names[key]):
                self._custom(module)
        else:
            self._run_steps(module, module)
        whole: dict[str, torch.Tensor] = {}
        for name in names:
            value, form = module._parameters.get(name), self._has.forms[key][name]
            assert form is not None  # the inventory lists registered parameters only
            if value is None or value.is_meta or value.shape != form.shape:
                raise ValueError(
                    f"init_method_using_config left {self._has.full_name(key, name)} of shape {tuple(form.shape)} as "
                    f"{value if value is None else (tuple(value.shape), value.device)}: it sets the values of the "
                    "module's own parameters, and keeps their shapes"
                )
            whole[name] = value
        return whole

    def _run_steps(self, module: nn.Module, kept: nn.Module | None, buffers: Collection[str] = ()) -> None:
        """Runs the module's recipe; changes only the parameters of ``kept`` and the module's ``buffers``."""
        key = id(module)
        for step in self._recipes[key].steps:
            with (
                seeds.seeded(self._device, self._seed, self._has.names[key], step.name),
                recipe.others_on_meta(step.module, kept, self._has.forms),
                recipe.buffers_kept(step.module, module, buffers),
            ):
                step.function()

    def _fill_buffers(self) -> None:
        """Fills all buffers and tensor attributes that were on meta; restores emptied buffers."""
        for (key, name), real in self._has.real_buffers.items():
            now = self._has.modules[key]._buffers.get(name)
            if now is not None and (now is real or now.dtype == real.dtype):
                self._has.modules[key]._buffers[name] = real.to(self._device)
        for key, names in self._has.meta_buffers.items():
            module = self._has.modules[key]
            known = [n for n in names if (key, n) in self._rebuilt or n not in self._recipes[key].unwritten]
            for name in known:
                empty = module.get_buffer(name)
                module._buffers[name] = torch.empty(empty.shape, dtype=empty.dtype, device=self._device)
            if written := [name for name in known if (key, name) not in self._rebuilt]:
                self._run_steps(module, None, written)
            for name in known:
                if (key, name) in self._rebuilt:
                    module.get_buffer(name).copy_(self._rebuilt[key, name])
        for key, names in self._has.meta_attributes.items():
            module = self._has.modules[key]
            for name in names:
                value = self._rebuilt.get((key, name))
                if value is not None:
                    same = [b for b in module._buffers if self._rebuilt.get((key, b)) is value]
                    attribute = module._buffers[same[0]] if same else value.to(self._device, vars(module)[name].dtype)
                    vars(module)[name] = attribute
        for key, names in [*self._has.meta_buffers.items(), *self._has.meta_attributes.items()]:
            for name in names:
                self._rebuilt.pop((key, name), None)

    def _after_module(self, module: nn.Module) -> None:
        tie_weights = getattr(module, "tie_weights", None)
        if not callable(tie_weights):
            return
        for owner, holders in self._has.holders.items():
            held = [self._has.modules[key]._parameters.get(name) for key, name in holders]
            # An uninitialised holder is on meta. After FSDP flattens it, it is absent or marked.
            ready = [p for p in held if p is not None and not p.is_meta and not is_flattened(p)]
            if len(ready) == len(holders) and any(p is not ready[0] for p in ready):
                tie_weights()
                logger.info("tied %s again", self._has.full_name(*owner))
                return

    def _validate(self) -> None:
        missed = [self._has.full_name(*owner) for owner in self._has.holders if owner[0] not in self._done]
        left = []
        for key, module in self._has.modules.items():
            tensors = [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]
            left += [self._has.full_name(key, n) for n, t in tensors if isinstance(t, torch.Tensor) and t.is_meta]
        missed += [name for name in left if name not in missed]
        twice = [
            self._has.names[key] or type(self._has.modules[key]).__name__
            for key, calls in self._calls.items()
            if calls > 1 and (key in self._has.meta_buffers or any(k == key for k, _ in self._has.owner))
        ]
        problems = []
        if missed:
            problems.append(
                f"{len(missed)} tensors were not initialised or are left on the meta device: {some(missed)}. Pass "
                "param_init_fn=get_param_init_fn() to FSDP (or call materialize()) within this context"
            )
        if twice:
            problems.append(
                f"{len(twice)} modules were initialised more than once: {some(twice)}. Give them to one FSDP call only"
            )
        if problems:
            raise RuntimeError("; ".join(problems))


def _random_seed() -> int:
    """Returns the configured seed; the default before ``init()``."""
    from smddp.sagemaker.state_handler import state

    return state.random_seed


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        from smddp.sagemaker.state_handler import state

        kind = state.mesh.device_type if state.mesh is not None else ("cuda" if torch.cuda.is_available() else "cpu")
        device = torch.device(kind)
    device = torch.device(device)
    if device.type not in ("cpu", "meta") and device.index is None:
        device = torch.device(device.type, torch.get_device_module(device.type).current_device())
    if device.type == "meta":
        raise ValueError("device is where the values go: it cannot be meta")
    return device
