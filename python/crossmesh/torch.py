"""Layouts of torch's DTensors, and plans on torch's own process groups.

``reshard`` runs a plan with the point-to-point operations of a group that the caller has: gloo, NCCL or any other. Nothing else has to
run beside it, so a torch job of any size can use a plan with the transport it trusts.

Every rank posts its operations in an order that Rust gives it (``Plan.posts``): pieces of messages by one clock of all ranks, in which whatever a piece
waits for has an earlier tick. So of all that somebody stands still for, the earliest has been posted on both sides, and nobody gets stuck.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from . import ArrayError, CrossmeshError, JobError, Plan
from ._placements import REDUCTIONS, device_mesh, dtensor, layout, layout_of, placements
from ._tensors import Arrays, empty, is_nccl

__all__ = ["PIECE_BYTES", "device_mesh", "dtensor", "empty", "layout", "layout_of", "placements", "reshard"]

# How much of a message arrives before it is passed on. At some 45 us an operation, smaller ones would keep Python in the way.
PIECE_BYTES = 1 << 20
_COMBINE = dict(zip(REDUCTIONS, (torch.add, torch.maximum, torch.minimum)))


def reshard(
    plan: Plan,
    tensors: Mapping[str, torch.Tensor],
    out: dict[str, torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, torch.Tensor]:
    """Moves this rank's shards as the plan says, over the group's own operations; every rank of the plan calls it.

    ``tensors`` are this rank's shards by name, ``out`` is filled in place (made where it is missing) and returned; both may have any strides.
    Where one rank brings what does not fit, every rank raises an ArrayError that names it, and nothing has moved.
    """
    rank, backend = dist.get_rank(group), dist.get_backend(group)
    if rank < 0:
        raise JobError("this rank is not in the group\nhint: the ranks of the group call it, and no others")
    program, posts, arrays, failed = {"ranks": []}, [], None, None
    piece_bytes = None if _matches_by_order(backend) else PIECE_BYTES
    try:
        program = json.loads(plan.for_rank(rank)) if rank < plan.num_ranks else {"ranks": [], "boxes": [], "tensors": []}
        arrays = Arrays(plan, program, rank, tensors, out, backend)
        posts = plan.posts(rank, piece_bytes) if rank < plan.num_ranks else []
    except Exception as error:  # the others have to hear of it first, whatever it is
        failed = error
    _agree(plan, failed, group, backend)
    if program["ranks"]:
        _Run(program, posts, arrays, group, piece_bytes).run()
    return arrays.out


def _agree(plan: Plan, failed: Exception | None, group: dist.ProcessGroup | None, backend: str) -> None:
    """Before a byte moves: gloo ends a process whose receive is smaller than what was sent, and a rank that stays away is waited for
    until the group gives up.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if is_nccl(backend) else torch.device("cpu")
    said = "" if failed is None else str(failed) if isinstance(failed, CrossmeshError) else f"{type(failed).__name__}: {failed}"
    text = torch.tensor(list(said.encode()), dtype=torch.uint8, device=device)
    mine = torch.tensor([plan.fingerprint, plan.num_ranks, len(text)], dtype=torch.int64, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, mine, group=group)
    found = [tuple(words.tolist()) for words in all_of_them]
    _check_plans([(plan, ranks) for plan, ranks, _ in found])
    bad = next((rank for rank, words in enumerate(found) if words[2]), None)
    if bad is not None:
        if bad != dist.get_rank(group):
            text = torch.empty(found[bad][2], dtype=torch.uint8, device=device)
        dist.broadcast(text, group_src=bad, group=group)
        if failed is not None:
            raise failed
        raise ArrayError(f"rank {bad} cannot take part, nothing was moved: {bytes(text.tolist()).decode()}")


def _matches_by_order(backend: str) -> bool:
    """Whether tags say nothing: a message is for whatever the receiver has posted next for its sender."""
    return is_nccl(backend)


def _check_plans(found: list[tuple[int, int]]) -> None:
    """Whether all ranks have one plan, and are as many as it is for."""
    differs = next((rank for rank, other in enumerate(found) if other != found[0]), None)
    if differs is not None:
        raise JobError(
            f"rank 0 has plan {_hex(found[0][0])}, rank {differs} has plan {_hex(found[differs][0])}; nothing was moved\n"
            "hint: plan with the same layouts, cluster and options on every rank"
        )
    if found[0][1] > len(found):
        raise JobError(f"the plan is for {found[0][1]} ranks, the group has {len(found)}; nothing was moved\nhint: start as many ranks as the plan has")


def _hex(fingerprint: int) -> str:
    return f"{fingerprint & (1 << 64) - 1:016x}"


class _Run:
    """One rank's program under way."""

    def __init__(self, program: dict, posts: list, arrays: Arrays, group, piece_bytes: int | None) -> None:
        self.tensors, self.posts, self.arrays, self.group, self.piece_bytes = program["tensors"], posts, arrays, group, piece_bytes
        self.rank, self.ops = arrays.rank, program["ranks"][0]["ops"]
        # By op: what ends each piece that was posted, of which so many have been waited for; and what its memory is, as one row.
        self.ends: list[list[Any]] = [[] for _ in self.ops]
        self.over = [0] * len(self.ops)
        self.rows: list[Any] = [None] * len(self.ops)

    def run(self) -> None:
        for number, piece, tag, waits in self.posts:
            for other, count in waits:
                self._end(other, count)
            op = self.ops[number]
            if op["op"] == "copy":
                self._copy(op)
            elif op["op"] == "send":
                self._send(number, op, piece, tag)
            else:
                self._recv(number, op, tag)
        for number, ends in enumerate(self.ends):
            self._end(number, len(ends))

    def _end(self, number: int, count: int) -> None:
        """Waits for the first pieces of an op. A copy was over when it was posted."""
        ends = self.ends[number]
        for piece in range(self.over[number], min(count, len(ends))):
            end, ends[piece] = ends[piece], None
            end()
        self.over[number] = max(self.over[number], count)

    def _copy(self, op) -> None:
        self._put(op, self.arrays.view(op, op["into"]), self.arrays.view(op, op["from"]))

    def _cut(self, row: torch.Tensor, piece: int) -> torch.Tensor:
        if self.piece_bytes is None:
            return row
        step = self.piece_bytes // row.element_size()
        return row[piece * step : (piece + 1) * step]

    def _send(self, number: int, op, piece: int, tag: int) -> None:
        if self.rows[number] is None:
            self.rows[number] = self._row_to_send(op)
        data = _plain(self._cut(self.rows[number], piece))
        work = dist.isend(data, group_dst=op["peer"], group=self.group, tag=tag)

        def wait(kept=data):  # the bytes stay until they have been read
            work.wait()

        self.ends[number].append(wait)

    def _row_to_send(self, op) -> torch.Tensor:
        if not op["bytes"]:
            return self._word()
        for other in op.get("follows", []) if self.piece_bytes is not None else []:
            if self.ops[other]["op"] == "recv" and not self.ops[other].get("reduce"):
                # The same bytes, where they arrive: what they are unpacked into is there when all of them are.
                return self.rows[other]
        return self.arrays.view(op, op["from"]).contiguous().reshape(-1)

    def _recv(self, number: int, op, tag: int) -> None:
        into = self.arrays.view(op, op["into"]) if op["bytes"] else self._word()
        direct = not op.get("reduce") and into.is_contiguous()
        data = into if direct else torch.empty(into.shape, dtype=into.dtype, device=into.device)
        row = self.rows[number] = data.reshape(-1)
        for piece in range(self._pieces(op)):
            part = _plain(self._cut(row, piece))
            work = dist.irecv(part, group_src=op["peer"], group=self.group, tag=tag + piece)
            self.ends[number].append(work.wait)
        if not direct:
            last = self.ends[number][-1]

            def unpack():
                last()
                self._put(op, into, data)

            self.ends[number][-1] = unpack

    def _pieces(self, op) -> int:
        return 1 if self.piece_bytes is None else max(1, -(-op["bytes"] // self.piece_bytes))

    def _put(self, op, into: torch.Tensor, data: torch.Tensor) -> None:
        if op.get("reduce"):
            combine = _COMBINE[self.tensors[op["tensor"]]["partial"]["op"]]
            data = combine(into, data)
        into.copy_(data)

    def _word(self) -> torch.Tensor:
        """A message that carries order alone; not every transport sends nothing."""
        return torch.zeros(1, dtype=torch.uint8, device=self.arrays.device)


def _plain(data: torch.Tensor) -> torch.Tensor:
    """What any transport can carry: 8-bit floats and truth values as bytes."""
    odd = data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bool)
    return data.view(torch.uint8) if odd else data
