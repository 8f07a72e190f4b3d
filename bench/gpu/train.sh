#!/bin/sh
# Training on a GPU: whether it is right, then how fast it is, beside torch.compile. In the folder that `cargo xtask gpu` makes:
#
#   sh train.sh [kernels] [losses] [resume] [speed] [times] [torch]      all of them without a word
#
# Numbers end in runs/ and in the tables that judge.py prints last.
cd "$(dirname "$0")" || exit 2
export CROSSMESH_CUBINS="$PWD/cubins"
[ $# -gt 0 ] || set -- kernels losses resume speed times torch
say() { printf '\n== %s (%s)\n' "$*" "$(date +%T)"; }
# A run into a folder of its own; what it says goes beside it.
run() {
    folder=runs/$1
    shift
    mkdir -p "$folder"
    timeout "${LIMIT:-90}" ./crossmesh train "$@" --set log.folder="$folder" > "$folder/said.txt" 2>&1 || {
        echo "FAILED: $folder: $(tail -n 4 "$folder/said.txt" | cut -c 1-600)"
    }
}

wanted() { case " $words " in *" $1 "*) true ;; *) false ;; esac; }
words="$*"
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader

if wanted kernels; then
    say "every method of Kernels against f64"
    timeout 120 ./gpu_kernels 3 2>&1 | tail -n 25
fi

if wanted losses; then
    say "losses on the card and on the host"
    for kind in gpt llama; do
        sizes="--set model.kind=$kind --set model.width=96 --set stage.0.mesh=1 --set stage.0.layers=2"
        for device in cpu cuda; do
            run "f32-$kind-$device" small.toml $sizes --set train.steps=50 --device $device &
            run "bf16-$kind-$device" small.toml $sizes --set train.steps=500 --set train.dtype=bf16 --device $device &
        done
    done
    wait
fi

if wanted resume; then
    say "resume, and from card to host and back"
    for kind in gpt llama; do
        sizes="--set model.kind=$kind --set train.dtype=bf16 --deterministic"
        run "whole-$kind" small.toml $sizes --set train.steps=40 --device cuda
        run "parts-$kind" small.toml $sizes --set train.steps=40 --set checkpoint.every=20 --device cuda
        rm -rf "runs/parts-$kind/checkpoints/step-00000040"
        run "parts-$kind" small.toml $sizes --set train.steps=40 --set checkpoint.every=20 --device cuda --resume
        ./crossmesh checkpoint diff "runs/whole-$kind/checkpoints/step-00000040" "runs/parts-$kind/checkpoints/step-00000040"
        # f32: 20 steps on the card, 20 on the host, 20 on the card; beside 60 on the host.
        run "host-$kind" small.toml --set model.kind=$kind --set train.steps=60 --device cpu
        run "mixed-$kind" small.toml --set model.kind=$kind --set train.steps=60 --set checkpoint.every=20 --set checkpoint.keep=9 --device cuda
        for step in 40 60; do rm -rf "runs/mixed-$kind/checkpoints/step-000000$step"; done
        run "mixed-$kind" small.toml --set model.kind=$kind --set train.steps=60 --set checkpoint.every=20 --set checkpoint.keep=9 --device cpu --resume
        rm -rf "runs/mixed-$kind/checkpoints/step-00000060"
        run "mixed-$kind" small.toml --set model.kind=$kind --set train.steps=60 --set checkpoint.every=20 --set checkpoint.keep=9 --device cuda --resume
    done
fi

if wanted speed; then
    say "speed"
    for model in gpt-350m gpt-1.3b gpt-2.6b llama-1b; do
        run "speed-$model" $model.toml
        grep -h "peak\|memory" "runs/speed-$model/said.txt" | tail -n 2
    done
fi

if wanted times; then
    say "where the card's time goes"
    for model in gpt-350m gpt-1.3b gpt-2.6b llama-1b; do
        CROSSMESH_GPU_TIMES="$PWD/runs/times-$model.txt" run "times-$model" $model.toml --set train.steps=8
        cat "runs/times-$model.txt".* | head -n 30
    done
fi

if wanted torch; then
    say "torch.compile"
    for model in 350m 1.3b 2.6b llama; do
        timeout "${LIMIT:-150}" python3 train_beside.py $model || echo "FAILED: torch, $model"
    done
fi

say "tables"
python3 judge.py
