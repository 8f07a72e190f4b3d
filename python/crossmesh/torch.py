"""Layouts of torch's DTensors, and plans on torch's own process groups.

``reshard`` runs a plan with the point-to-point operations of a group that the caller has: gloo, NCCL or any other. Nothing else has to
run beside it, so a torch job of any size can use a plan with the transport it trusts.

How it cannot get stuck: every rank posts its operations in the order of its list, none of which waits for itself; it stands still only for
operations that it has posted already, and transfers are listed behind what they wait for. So of all that somebody waits for, the
first in the order of transfers has been posted on both sides.
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
    program, arrays, failed = {"ranks": []}, None, None
    try:
        program = json.loads(plan.for_rank(rank)) if rank < plan.num_ranks else {"ranks": [], "boxes": [], "tensors": []}
        arrays = Arrays(plan, program, rank, tensors, out, backend)
    except Exception as error:  # the others have to hear of it first, whatever it is
        failed = error
    piece_bytes = _agree(plan, program, failed, group, backend)
    if program["ranks"]:
        _Run(plan, program, arrays, group, piece_bytes).run()
    return arrays.out


def _agree(plan: Plan, program: dict, failed: Exception | None, group: dist.ProcessGroup | None, backend: str) -> int | None:
    """Before a byte moves: gloo ends a process whose receive is smaller than what was sent, and a rank that stays away is waited for
    until the group gives up. Returns into which pieces messages are cut.

    They are not where messages match by order and not by tag, as NCCL's, or where somebody's ops wait for the whole of another.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if is_nccl(backend) else torch.device("cpu")
    said = "" if failed is None else str(failed) if isinstance(failed, CrossmeshError) else f"{type(failed).__name__}: {failed}"
    text = torch.tensor(list(said.encode()), dtype=torch.uint8, device=device)
    waits = any(_waits_for_all(op, rank["ops"]) for rank in program["ranks"] for op in rank["ops"])
    mine = torch.tensor([plan.fingerprint, plan.num_ranks, waits, len(text)], dtype=torch.int64, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, mine, group=group)
    found = [tuple(words.tolist()) for words in all_of_them]
    _check_plans([(plan, ranks) for plan, ranks, _, _ in found])
    bad = next((rank for rank, words in enumerate(found) if words[3]), None)
    if bad is not None:
        if bad != dist.get_rank(group):
            text = torch.empty(found[bad][3], dtype=torch.uint8, device=device)
        dist.broadcast(text, group_src=bad, group=group)
        if failed is not None:
            raise failed
        raise ArrayError(f"rank {bad} cannot take part, nothing was moved: {bytes(text.tolist()).decode()}")
    return None if _matches_by_order(backend) or any(words[2] for words in found) else PIECE_BYTES


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


def _waits_for_all(op: dict, ops: list[dict]) -> bool:
    """Whether an op needs more of another than the piece that it is at itself."""
    behind = op.get("follows", [])
    by_piece = op["op"] == "send" and len(behind) == 1 and not ops[behind[0]].get("reduce")
    return bool(op.get("after") or (behind and not by_piece))


class _Run:
    """One rank's program under way.

    What is passed on is passed on piece by piece, in the order of the pieces first and of the list then: a piece that anybody stands
    still for comes before the one that it is wanted for, in the order of all ranks, so somebody can always go on.
    """

    def __init__(self, plan: Plan, program: dict, arrays: Arrays, group, piece_bytes: int | None) -> None:
        self.tensors, self.arrays, self.group, self.piece_bytes = program["tensors"], arrays, group, piece_bytes
        self.rank, self.ops = arrays.rank, program["ranks"][0]["ops"]
        # A message's pieces have tags of their own, beyond those of all messages.
        self.tags = 2 * plan.num_transfers + 1
        # By op: what ends each piece, as far as they have been posted; and what its memory is, as one row.
        self.ends: list[list[Any]] = [[] for _ in self.ops]
        self.rows: list[Any] = [None] * len(self.ops)

    def run(self) -> None:
        left = list(range(len(self.ops)))
        while left:
            posted = [op for op in left if self._post(op)]
            if not posted:
                raise CrossmeshError(f"rank {self.rank}: ops {left[:5]} wait for each other")
            left = [op for op in left if len(self.ends[op]) < self._pieces(op)]
        for op in range(len(self.ops)):
            self._end(op)

    def _pieces(self, number: int) -> int:
        """Of a message: by its bytes alone, so that both ends count the same."""
        op = self.ops[number]
        if op["op"] == "copy" or self.piece_bytes is None:
            return 1
        return max(1, -(-op["bytes"] // self.piece_bytes))

    def _post(self, number: int) -> bool:
        """Starts the next piece of an op, of a receive all of them, once what it waits for is over; False where that has not been started."""
        op, piece = self.ops[number], len(self.ends[number])
        behind = op.get("follows", [])
        if any(len(self.ends[other]) < self._pieces(other) for other in op.get("after", [])):
            return False
        if any(len(self.ends[other]) <= piece for other in behind):
            return False
        for other in op.get("after", []):
            self._end(other)
        for other in behind:
            self._end(other, piece + 1)
        if op["op"] == "copy":
            self._copy(op)
            self.ends[number].append(_nothing)
        elif op["op"] == "send":
            self._send(number, op, piece)
        else:
            self._recv(number, op)
        return True

    def _end(self, number: int, count: int | None = None) -> None:
        """Waits for the first pieces of an op, or for all."""
        ends = self.ends[number]
        for piece in range(len(ends) if count is None else count):
            end, ends[piece] = ends[piece], _nothing
            end()

    def _copy(self, op) -> None:
        self._put(op, self.arrays.view(op, op["into"]), self.arrays.view(op, op["from"]))

    def _cut(self, row: torch.Tensor, number: int, piece: int) -> torch.Tensor:
        if self._pieces(number) == 1:
            return row
        step = self.piece_bytes // row.element_size()
        return row[piece * step : (piece + 1) * step]

    def _tag(self, op, piece: int) -> int:
        return op["tag"] + piece * self.tags

    def _send(self, number: int, op, piece: int) -> None:
        if self.rows[number] is None:
            behind = op.get("follows", [])
            if self.piece_bytes is not None and behind:
                # The same bytes, where they arrive: what they are unpacked into is there when all of them are.
                self.rows[number] = self.rows[behind[0]]
            else:
                self.rows[number] = (self.arrays.view(op, op["from"]) if op["bytes"] else self._word()).contiguous().reshape(-1)
        row = self.rows[number]
        data = _plain(self._cut(row, number, piece))
        work = dist.isend(data, group_dst=op["peer"], group=self.group, tag=self._tag(op, piece))

        def wait(kept=data):  # the bytes stay until they have been read
            work.wait()

        self.ends[number].append(wait)

    def _recv(self, number: int, op) -> None:
        into = self.arrays.view(op, op["into"]) if op["bytes"] else self._word()
        direct = not op.get("reduce") and into.is_contiguous()
        data = into if direct else torch.empty(into.shape, dtype=into.dtype, device=into.device)
        row, count = data.reshape(-1), self._pieces(number)
        self.rows[number] = row
        for piece in range(count):
            part = _plain(self._cut(row, number, piece))
            work = dist.irecv(part, group_src=op["peer"], group=self.group, tag=self._tag(op, piece))
            self.ends[number].append(work.wait)
        if not direct:
            last = self.ends[number][-1]

            def unpack():
                last()
                self._put(op, into, data)

            self.ends[number][-1] = unpack

    def _put(self, op, into: torch.Tensor, data: torch.Tensor) -> None:
        if op.get("reduce"):
            combine = _COMBINE[self.tensors[op["tensor"]]["partial"]["op"]]
            data = combine(into, data)
        into.copy_(data)

    def _word(self) -> torch.Tensor:
        """A message that carries order alone; not every transport sends nothing."""
        return torch.zeros(1, dtype=torch.uint8, device=self.arrays.device)


def _nothing() -> None:
    """It is over."""


def _plain(data: torch.Tensor) -> torch.Tensor:
    """What any transport can carry: 8-bit floats and truth values as bytes."""
    odd = data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bool)
    return data.view(torch.uint8) if odd else data
