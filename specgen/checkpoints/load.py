"""A located checkpoint → configuration, tokenizer, generation defaults, weights."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.checkpoints.explain import explain, out_of_memory, size_text
from specgen.checkpoints.located import INSTALL_GGUF, Located, pickle_only, weight_files
from specgen.errors import SpecgenError, UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


# Loading
def load_config(located: Located, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The checkpoint's configuration, without its weights. Raises UsageError where it is no decoder's."""
    from transformers import AutoConfig

    with explain(located.checkpoint, located.folder):
        # False, never None: None makes transformers ask on the terminal, and wait.
        config = AutoConfig.from_pretrained(located.path, trust_remote_code=bool(trust_remote_code), **located.pinned)
    if (reason := _no_decoder(config)) is not None:
        raise UsageError(
            f"{located.checkpoint} ({config.model_type}) {reason}: specgen needs a decoder, whose tokens depend on "
            "the text before them alone"
        )
    return config


# Their configurations have `is_decoder`, and their models do not look at it.
DECODERS_REGARDLESS = frozenset({"gpt_neox", "gpt_neox_japanese"})


def _no_decoder(config: PreTrainedConfig) -> str | None:
    """Why a configuration is not that of a causal model, though transformers has a causal class for its kind: that
    would load an encoder's weights, or half of an encoder-decoder's."""
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder"
    text = config.get_text_config(decoder=True)
    # Of classes that have the field: old files set it for others too, where it means nothing.
    looks = hasattr(type(text), "is_decoder") and text.model_type not in DECODERS_REGARDLESS
    if looks and not text.is_decoder:
        return "is an encoder (its config.json sets no is_decoder)"
    if getattr(text, "use_bidirectional_attention", None) in (True, "all") or getattr(text, "causal", None) is False:
        return "attends to the text behind a token as well"
    return None


def load_tokenizer(located: Located, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, without its weights."""
    from transformers import AutoTokenizer

    with explain(located.checkpoint, located.folder):
        return AutoTokenizer.from_pretrained(
            located.path, trust_remote_code=bool(trust_remote_code), **located.pinned
        )


def generation_defaults(located: Located) -> dict[str, Any]:
    """What the checkpoint's generation_config.json sets (null is not set); empty where there is none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    name = "generation_config.json"
    with explain(located.checkpoint, located.folder):
        if located.folder is not None:
            file = located.folder / name
            if not file.exists():
                return {}
        else:
            try:
                file = Path(hf_hub_download(located.path, name, revision=located.revision))
            except LocalEntryNotFoundError:  # no network: not the same as a checkpoint without this file
                raise
            except EntryNotFoundError:
                return {}
        settings = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise SpecgenError(f"{located.checkpoint}: {file} does not hold a JSON object.")
    ours = {"transformers_version"}
    return {k: v for k, v in settings.items() if v is not None and k not in ours and not k.startswith("_")}


def end_tokens(located: Located, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end a text: by generation_config.json, else the configuration, else the tokenizer."""
    candidates = (
        generation_defaults(located).get("eos_token_id"),
        getattr(config.get_text_config(decoder=True), "eos_token_id", None),
        tokenizer.eos_token_id,
    )
    found = next((c for c in candidates if c is not None and c != []), ())
    return tuple(sorted(set(found))) if isinstance(found, list | tuple) else (int(found),)


def load_weights(
    located: Located,
    *,
    dtype: torch.dtype | str,
    device: str = "cpu",
    device_map: str | Mapping[str, Any] | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The causal language model, in evaluation mode and without gradients, from safetensors only.

    dtype: a torch dtype or "auto" (the checkpoint's own). device: ignored with a `device_map`, which places
    layer by layer and needs accelerate. attention: transformers' name of the kind (None: its choice).
    Raises SpecgenError also where weights are missing: transformers would draw them at random and go on.
    """
    import torch

    _check_device(device)
    _check_weights(located)
    if device_map is not None and importlib.util.find_spec("accelerate") is None:
        raise UsageError(f"device_map: {device_map} needs accelerate. Install: {INSTALL_GGUF}")
    options: dict[str, Any] = dict(located.pinned)
    if device_map is not None:
        options["device_map"] = device_map
    if attention is not None:
        options["attn_implementation"] = attention
    with explain(located.checkpoint, located.folder):
        try:
            model = call_from_pretrained(
                located.path,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=bool(trust_remote_code),
                **options,
            )
            if device_map is None:
                model = model.to(torch.device(device))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            size = size_text(parameter_bytes(located, dtype, trust_remote_code))
            where = f"device_map {device_map}" if device_map is not None else device
            raise SpecgenError(
                f"{located.checkpoint}: out of memory on {where}, while loading {size} of parameters "
                f"({str(dtype).removeprefix('torch.')}).\n"
                "Try --dtype bfloat16 (half of float32), --device cpu, or device_map: auto in the profile."
            ) from error
    return model.eval().requires_grad_(False)


def parameter_bytes(located: Located, dtype: torch.dtype | str, trust_remote_code: bool = False) -> int:
    """The bytes of all parameters in `dtype`, from the configuration alone; tied weights count once."""
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(located, trust_remote_code)
    with explain(located.checkpoint, located.folder), torch.device("meta"), _calm():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=bool(trust_remote_code))
    if isinstance(dtype, str):
        own = getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype, None)
        dtype = own if isinstance(own, torch.dtype) else torch.float32
    return sum(p.numel() for p in model.parameters()) * dtype.itemsize


def call_from_pretrained(path: str, **options: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained` that refuses a checkpoint with missing weights."""
    from transformers import AutoModelForCausalLM

    with _calm():
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        raise SpecgenError(
            f"{path}: {len(missing)} of the weights that its config.json calls for are missing, "
            f"such as {missing[0]}. The checkpoint is incomplete, or not a causal language model."
        )
    return model


@contextlib.contextmanager
def _calm() -> Iterator[None]:
    """No report tables of transformers (errors are ours to tell), and progress bars only on a terminal."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise UsageError(f"device {device!r} is unknown; write cpu, cuda, cuda:1 or mps.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {device}: torch {torch.__version__} sees no CUDA device; use --device cpu.")


def _check_weights(located: Located) -> None:
    """Look for the weights before transformers does, whose messages do not say what is there instead."""
    folder = located.folder
    if folder is None:
        return
    with explain(located.checkpoint, folder):
        files = weight_files(folder)
    if gone := [f.name for f in files if not f.exists()]:
        raise SpecgenError(f"{located.checkpoint}: weights are missing in {folder}: {', '.join(gone[:4])}.")
    if files:
        return
    pickles = sorted(f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in folder.glob(pattern))
    if pickles:
        raise UsageError(pickle_only(located.checkpoint, f"({pickles[0]}) in {folder}"))
    raise UsageError(f"{located.checkpoint}: no weights (*.safetensors) in {folder}.")
