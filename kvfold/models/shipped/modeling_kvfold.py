# Copyright 2026 The kvfold authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""A stock transformers model with latent attention; shipped next to the weights, it needs transformers only.

The model is the source's own class. Only its attention modules are replaced, by a form of
attention_kvfold.py, and its tables of rotary frequencies. Legend: attention_kvfold.py.
"""

from functools import cache
from typing import Any

import transformers
from transformers import AutoModel, GenerationMixin, PreTrainedModel

from .attention_kvfold import FORMS
from .configuration_kvfold import KvfoldConfig
from .decoding_kvfold import attend  # noqa: F401 - transformers 4 fetches only the files that this one names
from .kernels_kvfold import takes  # noqa: F401
from .layers_kvfold import KvfoldRotaryEmbedding


@cache
def _attention_class(form: str, stock: Any) -> Any:
    """Return the form as a subclass of the stock attention too.

    Transformers finds attention modules by class to record weights.
    """
    members = {
        "__module__": __name__,
        "__reduce__": lambda self: (_blank, (_attention_class, form, stock), self.__dict__),
    }
    return type(FORMS[form].__name__, (FORMS[form], stock), members)


def _blank(make: Any, *which: Any) -> Any:
    """Make an object of a made class without its attributes, as copies and pickles begin."""
    made = make(*which)
    return made.__new__(made)


def _has_own_table(model: Any) -> bool:
    """Return whether a model rotates by a fold's frequencies, in its decoder or in its attention."""
    return any(isinstance(module, KvfoldRotaryEmbedding) for module in model.modules())


class _Folded(PreTrainedModel):
    """A class whose instances are of a subclass of the source's stock class, with attention replaced."""

    config_class = KvfoldConfig
    stock: Any = None

    def __new__(cls, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls if config is None else _model_class(cls, config))

    def __reduce__(self) -> Any:
        return _blank, (_model_class, type(self).__bases__[0], self.config), self.__dict__

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        _share_conversions(config, self.stock.__name__)
        super().__init__(config, *args, **kwargs)
        (start, path), form = self._start(config.kvfold["attention"]), config.kvfold["form"]
        for layer in config.kvfold.get("layers") or range(config.num_hidden_layers):
            place, _, name = path.format(layer=layer).rpartition(".")
            parent = start.get_submodule(place)
            stock = getattr(parent, name)
            setattr(parent, name, _attention_class(form, stock.__class__)(config, layer, stock))
        decoder = start.get_submodule(path.partition(".{layer}")[0].rpartition(".")[0])
        for name in ("rotary_emb", "pos_emb"):
            if hasattr(decoder, name):
                setattr(decoder, name, KvfoldRotaryEmbedding(config))
        if any(config.kvfold["frequencies"]) and not _has_own_table(self):
            raise ValueError(
                f"{type(decoder).__name__} of transformers {transformers.__version__} has no rotary table "
                "(rotary_emb or pos_emb) that this fold could replace; use another release of transformers"
            )

    def _start(self, path: str) -> tuple[Any, str]:
        """Return the module where a path of the configuration starts, and the path from there.

        It starts at the model with a head, or below the head where the source's weights are named like that.
        """
        head, _, rest = path.partition(".")
        for module in (self, self.base_model):
            if hasattr(module, head):
                return module, path
        return self, rest

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        """As transformers' own."""
        if config is None:
            hub = {
                "cache_dir",
                "force_download",
                "local_files_only",
                "token",
                "revision",
                "subfolder",
            } & kwargs.keys()
            config = KvfoldConfig.from_pretrained(
                pretrained_model_name_or_path, **{name: kwargs[name] for name in hub}
            )
        made: Any = super(_Folded, _model_class(cls, config))
        return made.from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return super(_Folded, _model_class(cls, config))._from_config(config, **kwargs)


class KvfoldModel(_Folded):
    """The base model, without a head."""


class KvfoldForCausalLM(_Folded, GenerationMixin):
    """The causal language model."""

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Refuse continuous batching: its cache has pages for keys and values, which no latent fits."""
        raise NotImplementedError(
            "transformers' continuous batching (generate_batch) caches keys and values of heads, and this "
            "model caches a latent; use generate(), or fold the source with --to gqa"
        )


def _share_conversions(config: Any, architecture: str) -> None:
    """Have transformers read other weights by the source's rules, such as fused experts or new names."""
    try:
        from transformers.conversion_mapping import (
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )
    except ImportError:  # transformers 4 keeps weights as they are stored
        return
    rules = get_checkpoint_conversion_mapping(architecture)
    rules = rules or get_checkpoint_conversion_mapping(config.kvfold["source_model_type"])
    register_checkpoint_conversion_mapping(config.model_type, rules or [], overwrite=True)


_MADE: dict[tuple[type, type], type] = {}


def _model_class(door: Any, config: Any) -> Any:
    """KvfoldModel or KvfoldForCausalLM and the stock class that `config` names, as one class.

    A class that was made like this is returned as it is.
    """
    if door not in (KvfoldModel, KvfoldForCausalLM):
        return door
    stock: Any = getattr(transformers, config.kvfold["source_architecture"])
    if door is KvfoldModel:
        stock = AutoModel._model_mapping[stock.config_class]
    if (door, stock) not in _MADE:
        members = {"__module__": __name__, "config_class": type(config), "stock": stock}
        _MADE[door, stock] = type(door.__name__, (door, stock), members)
    return _MADE[door, stock]
