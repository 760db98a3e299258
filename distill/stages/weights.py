"""The weights that a stage trains: sets of the model's own, or low-rank adapters next to them.

Shapes: I inputs and O outputs of a linear layer, R rank.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import InvalidInput
from ...models.decoder import is_attention
from ..parallel.tensors import full_tensor
from ..recipe.recipe import Lora, Stage, WeightSet

_ADAPTER = "default"  # peft's name for the only adapter


def _within(model: nn.Module, chosen: Callable[[nn.Module], bool]) -> set[str]:
    places = [place for place, module in model.named_modules() if chosen(module)]
    return {
        f"{place}.{name}" for place in places for name, _ in model.get_submodule(place).named_parameters()
    }


# From a model to the names of the weights in the set. Those of `lora` exist once the adapters do.
TRAINABLE: dict[WeightSet, Callable[[nn.Module], set[str]]] = {
    "all": lambda model: {name for name, _ in model.named_parameters()},
    "attention": lambda model: _within(model, is_attention),
    "attention+norms": lambda model: _within(
        model, lambda module: is_attention(module) or type(module).__name__.endswith("Norm")
    ),
    "lora": lambda model: {name for name, _ in model.named_parameters() if is_adapter(name)},
}


def set_trainable(model: nn.Module, stage: Stage) -> list[nn.Parameter]:
    """Freeze everything but the weights that a stage trains; for `lora`, add the adapters first.

    Returns:
        The weights to train.

    Raises:
        InvalidInput: as of `find_trained`.
    """
    found = find_trained(model, stage)
    if stage.train == "lora":
        from peft import LoraConfig, inject_adapter_in_model

        lora = stage.lora or Lora()
        config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=found, init_lora_weights=True)
        # The same first weights in every process and at every start.
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())), _on_the_cpu(model):
            torch.manual_seed(0)
            # Inside a module without a config: by one of deepseek_v3, PEFT 0.21 takes a dense model for one
            # with experts, and leaves out its MLP.
            inject_adapter_in_model(config, nn.ModuleDict({"model": model}))
    names = TRAINABLE[stage.train](model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def find_trained(model: nn.Module, stage: Stage) -> list[str]:
    """Return names of the weights that a stage trains, or of the linear layers that get adapters.

    The model stays as it is.

    Raises:
        InvalidInput: the model has no such weights or layers, or peft is not installed.
    """
    if stage.train == "lora":
        check_peft()
        found = _targets(model, stage.lora or Lora())
    else:
        found = sorted(TRAINABLE[stage.train](model))
    if not found:
        raise InvalidInput(f"train: {stage.train} finds no weights in {type(model).__name__}; use train: all")
    return found


def check_peft() -> None:
    """Refuse adapters if their library is not installed.

    Raises:
        InvalidInput: it is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise InvalidInput("train: lora needs the library peft; run pip install 'kvfold[lora]'")


def is_adapter(name: str) -> bool:
    """Return whether a weight of this name belongs to an adapter, not to the model."""
    return ".lora_" in name


def merged(module: Any) -> Tensor:
    """Return the whole weight of a linear layer with an adapter, the adapter's product included."""
    base = full_tensor(module.base_layer.weight)
    low_RI, high_OR = full_tensor(module.lora_A[_ADAPTER].weight), full_tensor(module.lora_B[_ADAPTER].weight)
    change_OI = module.scaling[_ADAPTER] * (high_OR @ low_RI)
    result: Tensor = base + (change_OI.T if module.fan_in_fan_out else change_OI)
    return result


def adapted(model: nn.Module) -> dict[str, Any]:
    """Return the linear layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@contextmanager
def _on_the_cpu(model: nn.Module) -> Iterator[None]:
    """Make weights on the meta device look real, without taking memory, for the duration.

    Adapters are put on the device of the weights, and would otherwise get no numbers.
    """
    empty = [place for place in places_of(model) if place[2].is_meta]
    for module, name, weight in empty:
        module._parameters[name] = nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape))
    yield
    for module, name, weight in empty:
        module._parameters[name] = weight


def places_of(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return every parameter with its module and its name there; tied ones under each of their names."""
    found = [
        (module, name, value) for module in model.modules() for name, value in module._parameters.items()
    ]
    return [(module, name, weight) for module, name, weight in found if weight is not None]


def _targets(model: Any, lora: Lora) -> list[str]:
    modules = dict(model.named_modules())
    # Losses read only the weight of the head, so an adapter next to it would get no gradient.
    heads = [name for name in modules if modules[name] is model.get_output_embeddings()]
    linear = [
        name
        for name, module in modules.items()
        # Conv1D is GPT-2's, with its weight transposed.
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and name not in heads
    ]
    if lora.targets is None:
        inside = {name.rpartition(".")[0] for name in TRAINABLE["attention"](model)}
        return [name for name in linear if name in inside]
    known = sorted({name.rpartition(".")[2] for name in linear})
    unknown = sorted(set(lora.targets) - set(known))
    for name in heads:
        if name.rpartition(".")[2] in unknown:
            raise InvalidInput(
                f"lora.targets names {name}, the output embedding, which cannot have an adapter; leave it out"
            )
    if unknown:
        raise InvalidInput(
            f"lora.targets names {unknown[0]}, which is not a linear layer of the student; known: "
            f"{', '.join(known)}"
        )
    return [name for name in linear if name.rpartition(".")[2] in lora.targets]
