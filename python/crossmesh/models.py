"""Models as tables of tensors, so that a whole model is planned in three lines.

>>> import crossmesh as cm
>>> model = cm.models.llama3("8B")
>>> plan = cm.models.model_plan(model, "fsdp 8", "tp 4", fused=True, nics=8, nic="400Gbit")
>>> plan.num_transfers, round(plan.lower_bound_s, 3)
(4059, 0.04)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from . import Cluster, Plan
from . import plan as _plan
from ._native import Model

__all__ = ["Model", "from_config", "from_shapes", "llama3", "mixtral", "model_plan", "qwen3"]


def llama3(size: str) -> Model:
    """Llama 3: ``"8B"``, ``"70B"`` or ``"405B"``.

    >>> llama3("8B").parameters
    8030261248
    """
    return Model.preset(f"llama3-{size}")


def qwen3(size: str) -> Model:
    """Qwen3: ``"8B"``, or with experts ``"30B-A3B"`` or ``"235B-A22B"``."""
    return Model.preset(f"qwen3-{size}")


def mixtral(size: str = "8x7B") -> Model:
    return Model.preset(f"mixtral-{size}")


def from_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> Model:
    """A model from its config.json: the path, or what it holds."""
    if isinstance(config, Mapping):
        return Model.from_config(json.dumps(dict(config)))
    with open(config, encoding="utf-8") as file:
        return Model.from_config(file.read())


def from_shapes(
    shapes: Mapping[str, Sequence[int]], *, dtype: Any = "bf16", roles: Mapping[str, str] | None = None, name: str = "table"
) -> Model:
    """A model from the names and shapes of its tensors, in its order.

    What tensor parallelism does with a weight is told by its name: ``q_proj``, ``gate_up_proj`` and the like are cut by rows, ``o_proj`` and
    ``down_proj`` by columns, stacked experts inside of an expert, and what no rule knows stays whole. ``roles`` goes before that, by the ends of
    names: ``"column"``, ``"column 4096+1024+1024"`` (fused, each part on its own), ``"row"``, ``"whole"``, ``"experts column 64+64"``, ``"experts row"``.

    >>> shapes = {"h.0.mix.weight": (16, 8), "h.0.down_proj.weight": (8, 16), "h.0.norm.weight": (8,)}
    >>> for name, src, dst in from_shapes(shapes, roles={"mix": "column 8+8"}).pairs("fsdp 2", "tp 2"):
    ...     print(name, dst)
    h.0.mix.weight bf16[16,8]@I{tp:2}=2-3(tp of 8+8,_)
    h.0.down_proj.weight bf16[8,16]@I{tp:2}=2-3(_,tp)
    h.0.norm.weight bf16[8]@I{tp:2}=2-3(_)
    """
    tensors = {tensor: [int(size) for size in shape] for tensor, shape in shapes.items()}
    word = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    table = {"name": name, "dtype": word.rsplit(".", 1)[-1], "tensors": tensors, "roles": dict(roles or {})}
    return Model.from_table(json.dumps(table))


def model_plan(model: Model, src: str, dst: str, *, fused: bool = False, devices_per_host: int = 8, **options: Any) -> Plan:
    """Plans all weights of a model, from a job cut like ``"fsdp 64"`` to one cut like ``"dp 4, tp 8"``.

    ``fused``: query, key and value are one tensor, and so are gate and up. Without ``cluster``, hosts have 8 devices, and both jobs have
    hosts of their own. Other options are those of ``plan``.
    """
    pairs = model.pairs(src, dst, fused=fused)
    if "cluster" not in options:
        sides = [max(layout.ranks[-1] for layout in side) for side in zip(*((s, d) for _, s, d in pairs))]
        first = sides[0] + 1
        counts = [first, sides[1] + 1 - first]
        options["cluster"] = _hosts(counts, devices_per_host)
    return _plan({name: (before, after) for name, before, after in pairs}, **options)


def _hosts(counts: list[int], per_host: int) -> Cluster:
    """Full hosts for each side, and a smaller one for what is left."""
    cluster = Cluster(hosts=1, devices=1)
    lines = []
    for ranks in counts:
        for hosts, devices in ((ranks // per_host, per_host), (1 if ranks % per_host else 0, ranks % per_host)):
            if hosts:
                lines.append(f"[[host]]\ncount = {hosts}\ndevices = {devices}")
    cluster.toml = "\n".join(lines)
    return cluster
