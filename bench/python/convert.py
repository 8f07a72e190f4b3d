"""What torch needs for what ``checkpoint convert`` does: a DCP into memory, and out again as one file.

    python bench/python/convert.py DCP OUT [--by torch|safetensors|crossmesh] [--max-memory 256MiB]

``dcp.load`` wants every tensor allocated beforehand; then ``torch.save``, or safetensors' ``save_file``, and fsync. Prints the time and the
most memory that was resident, each way in a process of its own (all three without ``--by``), so that none finds the memory of another.
A DCP to try it on: ``cargo run --release -p crossmesh-checkpoint --example convert_speed -- FOLDER 4 256 0`` leaves FOLDER/dcp.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time


def load(folder):
    """The whole checkpoint, in memory."""
    import torch
    import torch.distributed.checkpoint as dcp

    metadata = dcp.FileSystemReader(folder).read_metadata()
    kept = {name: m for name, m in metadata.state_dict_metadata.items() if hasattr(m, "size")}
    values = {name: torch.empty(m.size, dtype=m.properties.dtype) for name, m in kept.items()}
    dcp.load(values, checkpoint_id=folder)
    return values


def by_torch(folder, out, _):
    import torch

    values = load(folder)
    with open(f"{out}/model.pt", "wb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())


def by_safetensors(folder, out, _):
    from safetensors.torch import save_file

    save_file(load(folder), f"{out}/model.safetensors")
    file = os.open(f"{out}/model.safetensors", os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def by_crossmesh(folder, out, max_memory):
    import crossmesh as cm

    cm.checkpoint.convert(folder, f"{out}/crossmesh", to="hf", max_memory=max_memory)


WAYS = {"torch": by_torch, "safetensors": by_safetensors, "crossmesh": by_crossmesh}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--by", choices=WAYS)
    parser.add_argument("--max-memory", default="256MiB")
    args = parser.parse_args()
    if args.by is None:
        for way in WAYS:
            subprocess.run([sys.executable, __file__, args.folder, args.out, "--by", way, "--max-memory", args.max_memory], check=True)
        return
    os.makedirs(args.out, exist_ok=True)
    # Imports are no part of it.
    if args.by == "crossmesh":
        import crossmesh  # noqa: F401
    else:
        import safetensors.torch  # noqa: F401
        import torch.distributed.checkpoint  # noqa: F401
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    WAYS[args.by](args.folder, args.out, args.max_memory)
    seconds = time.monotonic() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"by": args.by, "seconds": round(seconds, 2), "peak_mib": peak >> 10, "before_mib": before >> 10}))


if __name__ == "__main__":
    main()
