"""What a GGUF file says against what its conversion computes: applied, or the file is refused by name.

transformers reads the keys that it knows and drops the rest without a word: scaled rotary embeddings, soft caps,
windows, tensors. Each of them changes the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specgen.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Settled by the tensors' shapes, which must fit, or by their number; or of no effect on a text that fits.
BY_SHAPE = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
        "feed_forward_length",
        "rope.scaling.finetuned",
        "shortconv.l_cache",
        "ssm.conv_kernel",
        "ssm.inner_size",
        "ssm.state_size",
        "ssm.time_step_rank",
        "tensor_data_layout",
        "vocab_size",
    }
)

# The names of the same thing in a configuration.
IN_CONFIG: Mapping[str, tuple[str, ...]] = {
    "attention.head_count": ("num_attention_heads", "n_head", "num_heads"),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "router_logit_softcapping": ("router_logit_softcapping",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_norm": ("norm_topk_prob",),
    "logit_scale": ("logit_scale",),
    "use_parallel_residual": ("use_parallel_residual",),
}

# Values that change nothing, whether or not a model knows the key.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.head_count": (0,),
    "attention.head_count_kv": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.type": ("none",),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "router_logit_softcapping": (0.0,),
    "ssm.dt_b_c_rms": (False,),
}

# What transformers' loader leaves out, where the model's configuration has a place for it.
SETTABLE: Mapping[tuple[str, str], str] = {("phi3", "attention.sliding_window"): "sliding_window"}

ROPE_FREQS = "rope_freqs.weight"
# Llama 3.1 to 3.3: what their converter computed the tensor from; its factor is the tensor's largest entry.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True)
class Header:
    """A GGUF file's architecture, its keys of that architecture without the prefix, and its tensors' names.

    rope_freqs: what each frequency of the rotary embedding is divided by [rotary dimensions / 2], if it says so.
    """

    architecture: str
    keys: Mapping[str, Any]
    tensors: tuple[str, ...]
    rope_freqs: tuple[float, ...] | None = None

    @classmethod
    def of(cls, reader: Any) -> Header:
        """From a `gguf.GGUFReader`."""
        architecture = str(reader.fields["general.architecture"].contents())
        prefix = f"{architecture}."
        keys = {n.removeprefix(prefix): f.contents() for n, f in reader.fields.items() if n.startswith(prefix)}
        freqs = next((t.data.ravel().tolist() for t in reader.tensors if t.name == ROPE_FREQS), None)
        names = tuple(str(tensor.name) for tensor in reader.tensors)
        return cls(architecture, keys, names, None if freqs is None else tuple(freqs))


@dataclass(slots=True)
class Account:
    """What of a file is left to explain, by name, with what was applied on top of transformers' own loader."""

    header: Header
    checkpoint: str
    applied: dict[str, Any] = field(default_factory=dict)
    _scaling: frozenset[str] = frozenset()

    def apply(self, config: PreTrainedConfig) -> None:
        """Set what the loader has left out, in place. Raises UsageError for what the model cannot express."""
        for (architecture, key), name in SETTABLE.items():
            if architecture == self.header.architecture and key in self.header.keys:
                setattr(config, name, self.header.keys[key])
                self.applied[key] = self.header.keys[key]
        base, own = self.header.keys.get("rope.freq_base"), _rope(config)
        if base is not None and own and not _close(base, own.get("rope_theta")):
            self._set_rope(config, {"rope_theta": float(base)})
        scaling = self._rope_scaling()
        freqs = self.header.rope_freqs
        if freqs is not None and any(f != 1 for f in freqs):
            if scaling is not None:
                self._refuse([ROPE_FREQS, *self._named(self._scaling)], "two kinds of rotary scaling at once")
            scaling = self._rope_from_freqs(config, freqs)
            self.applied[ROPE_FREQS] = scaling["rope_type"]
        if scaling is not None:
            self._set_rope(config, scaling)

    def settle(self, model: PreTrainedModel, config: PreTrainedConfig) -> None:
        """Raises UsageError for every key and tensor that the converted model does not use.

        config: as it loads from what was saved, not as it was set.
        """
        unused = self._unused_tensors(model)
        unused += [f"{self.header.architecture}.{key}" for key in self.header.keys if not self._holds(key, config)]
        if unused:
            self._refuse(unused, "the converted model would not use it")

    def _refuse(self, names: Iterable[str], why: str) -> None:
        names = list(names)
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise UsageError(
            f"{self.checkpoint}: this GGUF file holds {', '.join(names[:4])}{more}, which changes the text: {why}. "
            "Take the checkpoint in safetensors."
        )

    # Rotary embeddings
    def _rope_scaling(self) -> dict[str, Any] | None:
        """The scaling that the keys name, as transformers' parameters; None without any."""
        keys = self.header.keys
        kind, factor = keys.get("rope.scaling.type"), keys.get("rope.scaling.factor", keys.get("rope.scale_linear"))
        self._scaling = frozenset(k for k in keys if k.startswith(("rope.scaling.", "rope.scale")))
        if kind in (None, "none", "linear"):  # llama.cpp's default is linear
            self._only("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear")
            scaled = kind != "none" and factor not in (None, 0, 1)
            return {"rope_type": "linear", "factor": float(factor)} if scaled else None
        if kind != "yarn" or not factor or self.header.architecture == "gpt-oss":
            self._refuse(self._named(self._scaling), f"rotary scaling of the type {kind} is not applied here")
        self._only(
            "rope.scaling.type",
            "rope.scaling.factor",
            "rope.scaling.attn_factor",
            "rope.scaling.yarn_beta_fast",
            "rope.scaling.yarn_beta_slow",
        )
        scaling = {
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": int(
                keys.get("rope.scaling.original_context_length") or keys["context_length"]
            ),
            "beta_fast": float(keys.get("rope.scaling.yarn_beta_fast", 32)),
            "beta_slow": float(keys.get("rope.scaling.yarn_beta_slow", 1)),
        }
        if keys.get("rope.scaling.attn_factor") not in (None, 0, 1):  # llama.cpp multiplies YaRN's own by it
            scaling["attention_factor"] = float(keys["rope.scaling.attn_factor"]) * (0.1 * math.log(factor) + 1)
        return scaling

    def _named(self, keys: Iterable[str]) -> list[str]:
        return [f"{self.header.architecture}.{key}" for key in sorted(keys)]

    def _only(self, *used: str) -> None:
        """Raises UsageError for a scaling key beyond the used ones that is not neutral."""
        more = [
            key
            for key in self._scaling - {*used, "rope.scaling.original_context_length", "rope.scaling.finetuned"}
            if not _neutral(key, self.header.keys[key])
        ]
        if more:
            self._refuse(self._named(more), "this part of the rotary scaling is not applied here")

    def _set_rope(self, config: PreTrainedConfig, scaling: Mapping[str, Any]) -> None:
        own = dict(getattr(config, "rope_parameters", None) or {})
        nested = [name for name, value in own.items() if isinstance(value, dict)]
        if nested and not (scaling.get("rope_type") in (None, "linear") and "full_attention" in own):
            self._refuse(self._named(self._scaling) or [ROPE_FREQS], "its layers differ in their rotary embedding")
        if not own:
            self._refuse(self._named(self._scaling) or [ROPE_FREQS], "the model has no rotary embedding to scale")
        if nested:  # Gemma 3: windows are not scaled
            own["full_attention"] = {**own["full_attention"], **scaling}
        else:
            own = {**own, **scaling}
        config.rope_parameters = own
        self.applied["rope_parameters"] = own

    def _rope_from_freqs(self, config: PreTrainedConfig, freqs: tuple[float, ...]) -> dict[str, Any]:
        """Llama 3's parameters where they give these factors, else the factors themselves."""
        import torch
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        own = getattr(config, "rope_parameters", None) or {}
        if 2 * len(freqs) != _rotary_dimensions(config) or not all(f > 0 and math.isfinite(f) for f in freqs):
            self._refuse([ROPE_FREQS], f"it has {len(freqs)} entries that do not fit the rotary embedding")
        base = own.get("rope_theta")
        if base is not None:
            exponents = torch.arange(0, 2 * len(freqs), 2, dtype=torch.float64) / (2 * len(freqs))
            wanted = 1 / (base**exponents * torch.tensor(freqs, dtype=torch.float64))
            scaling = {"rope_type": "llama3", "factor": float(max(freqs)), **LLAMA3}
            tried = type(config).from_dict(config.to_dict())
            tried.rope_parameters = {**own, **scaling}
            found, _ = ROPE_INIT_FUNCTIONS["llama3"](tried, torch.device("cpu"))
            if torch.allclose(found.double(), wanted, rtol=1e-5, atol=0):
                return scaling
        # LongRoPE with one set of factors for both lengths: they apply to every text alike.
        factors = [float(f) for f in freqs]
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": int(config.max_position_embeddings),
        }

    # Keys and tensors
    def _holds(self, key: str, config: PreTrainedConfig) -> bool:
        """Whether the converted model computes what the key says."""
        value = self.header.keys[key]
        if key in BY_SHAPE or _neutral(key, value):
            return True
        if key in self._scaling:  # refused when it was read, or applied: then the saved configuration has it
            wanted = self.applied.get("rope_parameters")
            return wanted is None or _same_rope(wanted, getattr(config, "rope_parameters", None) or {})
        if key in ("attention.key_length", "attention.value_length"):
            return bool(value == _head_dimensions(config))
        if key == "rope.dimension_count":
            return bool(value == _rotary_dimensions(config))
        if key == "rope.freq_base":
            return _close(value, _theta(config))
        if key == "attention.sliding_window" and value >= self.header.keys.get("context_length", math.inf):
            return True  # no text is longer than the window
        if key == "attention.head_count_kv" and isinstance(value, list):  # layers without attention have none
            heads = {n for n in value if n}
            value = heads.pop() if len(heads) == 1 else value
        own = [getattr(config, name) for name in IN_CONFIG.get(key, ()) if getattr(config, name, None) is not None]
        return bool(own) and _close(value, own[0])

    def _unused_tensors(self, model: PreTrainedModel) -> list[str]:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor
        from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map as names_of

        architecture = self.header.architecture
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
        known = set(names_of(model, processor))
        # What loaders of a kind take without a name in the map.
        special = {"gpt2": r"output\.weight", "gpt-oss": r"blk\.\d+\.ffn_(down|gate|up|gate_up)_projs\.weight"}
        pattern = special.get(architecture, r"(?!)")

        def used(name: str) -> bool:
            if name == ROPE_FREQS:
                freqs = self.header.rope_freqs or ()
                return ROPE_FREQS in self.applied or all(f == 1 for f in freqs)
            return name in known or name.removesuffix(".weight") in known or re.fullmatch(pattern, name) is not None

        return [name for name in self.header.tensors if not used(name)]


def _neutral(key: str, value: Any) -> bool:
    return key in NEUTRAL and value in NEUTRAL[key]


def _close(value: Any, own: Any) -> bool:
    """Equal, or equal in float32, which the file's numbers are rounded to."""
    numbers = isinstance(value, int | float) and isinstance(own, int | float)
    return math.isclose(value, own, rel_tol=1e-6) if numbers else bool(value == own)


def _head_dimensions(config: PreTrainedConfig) -> int:
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def _rope(config: PreTrainedConfig) -> Mapping[str, Any]:
    """The parameters of the rotary embedding, of full attention where layers differ."""
    own = getattr(config, "rope_parameters", None) or {}
    return own.get("full_attention", own)


def _theta(config: PreTrainedConfig) -> float | None:
    own = _rope(config).get("rope_theta", getattr(config, "rope_theta", None))
    return None if own is None else float(own)


def _rotary_dimensions(config: PreTrainedConfig) -> int:
    own = getattr(config, "rotary_dim", None)
    partial = _rope(config).get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return int(own or _head_dimensions(config) * (1 if partial is None else partial))


def _same_rope(wanted: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    return all(
        _same_rope(value, own.get(name) or {}) if isinstance(value, dict) else _close(value, own.get(name))
        for name, value in wanted.items()
    )
