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
"""Configuration of a checkpoint whose attention kvfold folded; shipped next to the weights.

config.json is the source's own, with `model_type: kvfold` and these fields:

    kvfold.form                 "decoupled" or "intact" (see attention_kvfold.py)
    kvfold.source_model_type    the source's model_type: gives the stock configuration and model classes
    kvfold.source_architecture  the source's causal language model
    kvfold.attention            where the attention of a layer is: "model.layers.{layer}.self_attn"
    kvfold.frequencies          tables of angular frequencies of the rotary pairs (slots, or pairs of a head),
                                radians per token
    kvfold.tables               the number of each layer's table; empty where there is one
    kvfold.scale                factor on q·k
    kvfold.growth               rate r and length L, where queries grow by 1 + r·log(1 + position // L);
                                otherwise absent
    kvfold.biases               which of the projections "q", "kv", "k", "v", "o" have a bias
    kvfold.layers               numbers of the layers that attend; absent where all do
    kvfold.gate                 name of the projection that gates each head's output; otherwise absent
    kvfold.latent_norm          "fitted" where norms of latents are real ones; otherwise absent
    kvfold.head_dim             of the source, in the intact form and where it has key norms
    kvfold.key_heads            of the source, likewise
    kvfold.norm_widths          widths of the source's query and key norms, or heads and width where each head
                                has its own weight, where the form is decoupled; otherwise absent
    kv_lora_rank                width of the latent in the decoupled form
    latent_rank                 width of the latent in the intact form
    qk_rope_head_dim            width of the shared rotary key in the decoupled form
    qk_nope_head_dim            width of a head's un-rotated query in the decoupled form
    v_head_dim                  width of a head's value
    q_lora_rank                 width of compressed queries; null where they are not
"""

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

_CLASSES: dict[str, type] = {}


class KvfoldConfig(PretrainedConfig):
    """The source's configuration with the widths of the fold.

    An instance belongs to a subclass of both this class and the stock configuration of
    `kvfold.source_model_type`, so that the stock model reads its defaults, aliases and validation as ever.
    """

    model_type = "kvfold"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a configuration from the content of config.json; `kwargs` as in transformers."""
        return super(KvfoldConfig, folded_config(config_dict["kvfold"]["source_model_type"])).from_dict(
            config_dict, **kwargs
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.kvfold["source_model_type"], self.__dict__)


def folded_config(source_model_type: str) -> Any:
    """Return the configuration class of folds of one stock model type, made once."""
    if source_model_type not in _CLASSES:
        stock = CONFIG_MAPPING[source_model_type]
        plan = getattr(stock, "base_model_tp_plan", None) or {}
        # The stock plan splits projections over devices that a folded layer does not have; its attention is
        # replicated.
        plan = {name: style for name, style in plan.items() if "attn" not in name and "attention" not in name}
        members = {"model_type": KvfoldConfig.model_type, "base_model_tp_plan": plan, "__module__": __name__}
        _CLASSES[source_model_type] = type(KvfoldConfig.__name__, (KvfoldConfig, stock), members)
    return _CLASSES[source_model_type]


def _restore(source_model_type: str, state: dict[str, Any]) -> Any:
    """Rebuild a copied or unpickled configuration, and its class if necessary."""
    cls = folded_config(source_model_type)
    config = cls.__new__(cls)
    config.__dict__.update(state)
    return config
