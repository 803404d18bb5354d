"""The command as a process, on a tiny pair that lies in a folder."""

from __future__ import annotations

import os
import pty
import select
import subprocess
from pathlib import Path
from typing import Any

import tokenizers as tk
import transformers as tf
import yaml

from support import warm
from support.tiny import noisy_copy, tiny_llama
from support.warm import SPECGEN

WORDS = ["[UNK]", *"abcdefghijklmno .\né😀", "[bold]", "[/bold]", "[red]x", "<end>"]


CONTEXT = 30_000


PROMPT = "a [bold]loaf[/bold] of bacon"


N = 60  # tokens of the usual run


TASTES = (
    "NO_COLOR",
    "FORCE_COLOR",
    "CLICOLOR_FORCE",
    "COLUMNS",
    "GITHUB_ACTIONS",
    "PY_COLORS",
    "PYTHONIOENCODING",
    "PYTHONUNBUFFERED",
)


def write_tokenizer(folder: Path, words: list[str] = WORDS) -> None:
    """A character is a token, and so is each word in brackets: texts are printable, and full of markup."""
    tokenizer = tk.Tokenizer(tk.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    longer = r"\[bold\]|\[/bold\]|\[red\]x|<end>"
    tokenizer.pre_tokenizer = tk.pre_tokenizers.Split(tk.Regex(rf"{longer}|[\s\S]"), "isolated")
    tokenizer.decoder = tk.decoders.Fuse()
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


def write_model(folder: Path, model: Any) -> None:
    model.config.max_position_embeddings = CONTEXT
    model.save_pretrained(folder)


def write_pair(folder: Path) -> Path:
    """Target, draft and a profile that names them, relative to itself; returns the profile's path."""
    target = tiny_llama(seed=3, vocab=len(WORDS))
    for name, model in (("target", target), ("draft", noisy_copy(target, 0.3))):
        write_model(folder / name, model)
        write_tokenizer(folder / name)
    settings = {
        "target": {"checkpoint": "./target"},
        "draft": {"kind": "checkpoint", "checkpoint": "./draft"},
        "decoding": {"k": 3},
    }
    (folder / "pair.yaml").write_text(yaml.safe_dump(settings))
    return folder / "pair.yaml"


def environment(folder: Path, **extra: str) -> dict[str, str]:
    """One thread, no hub, no GPU, a cache of its own, and nothing of the caller's taste in colours and buffers.

    `specgen` is the warm one of support.warm, once it is started and unless `extra` changes what imports have read.
    """
    kept = {k: v for k, v in os.environ.items() if k not in TASTES}
    own = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(warm.folder() / "hf"),
        "CUDA_VISIBLE_DEVICES": "",
        "SPECGEN_CACHE": str(folder / "cache"),
        "TERM": "xterm-256color",
        "PATH": os.pathsep.join((str(warm.bin_folder()), str(Path(SPECGEN).parent), os.environ["PATH"])),
    }
    return {**kept, **own, **extra}


def process(folder: Path, *arguments: str, stdin: Any = subprocess.DEVNULL, **extra: str) -> Any:
    """`specgen ARGUMENTS` in `folder`, run to its end."""
    given = {"input": stdin} if isinstance(stdin, str) else {"stdin": stdin}
    env = environment(folder, **extra)
    return subprocess.run(
        [warm.command(env), *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        **given,
    )


def run(folder: Path, *arguments: str, **options: Any) -> Any:
    """`specgen run` on the tiny pair."""
    return process(folder, "run", "--profile", "pair.yaml", "--max-new-tokens", str(N), *arguments, **options)


def refused(result: Any, code: int, *words: str) -> str:
    """Nothing on stdout, one or two lines on stderr that say `words`, no traceback, the exit code."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert 1 <= len(lines) <= 2, result.stderr
    assert lines[0].startswith("specgen: ")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
    return str(result.stderr)


def on_terminal(folder: Path, arguments: list[str], **extra: str) -> tuple[int, bytes]:
    """Exit code and everything written, with a terminal of 200 columns as stdin, stdout and stderr."""
    ours, theirs = pty.openpty()
    env = environment(folder, COLUMNS="200", **extra)
    child = subprocess.Popen(
        [warm.command(env), *arguments], cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = b""
    try:
        while select.select([ours], [], [], 120)[0]:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux: the other side is closed
                break
            if not piece:
                break
            written += piece
        return child.wait(30), written
    finally:
        child.kill()
        child.wait()
        os.close(ours)
