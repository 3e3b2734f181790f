#!/usr/bin/env bash
# The GPU path on a GPU: every kernel against float64 and against what the device can do, whole models over every path
# that their KV blocks may take, steps over their roof. Under four minutes; a table last, JSON beside it.
#
#   bench/gpu_check.sh [flags]      --help lists the flags; --cpu runs it in Triton's interpreter, without speeds
#
# Needs torch, triton, numpy, safetensors, xxhash, rich. Blocks between two processes need pydantic and pyzmq too: without
# them that part is left out and named. WHEELS=FOLDER installs the wheels in it into a scratch folder first. On a machine
# that nothing can be fetched to, bring these (for Python 3.12): pydantic pydantic_core annotated_types typing_inspection
# typing_extensions pyzmq. Environment: PYTHON (default: .venv's here, else python3), WHEELS.
# Exit codes: 0 all is right, 1 something is not, 2 bad flags, 3 no GPU. nccl stays unchecked: it refuses two ranks on one GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-}
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python || python=python3; }
if [ -n "${WHEELS:-}" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
"$python" -m bench.gpu_check "$@"
