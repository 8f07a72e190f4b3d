"""What a model's loaders read of their tensors, against element by element."""

import random

import pytest

torch = pytest.importorskip("torch")

import crossmesh as cm
from crossmesh.integrations.loaders import Watched, box_of, read_by


def random_view(rng, tensor):
    """A few slices, splits, transposes and reshapes, as loaders make them; whether only slices were made."""
    only_slices = True
    for _ in range(rng.randrange(4)):
        if tensor.ndim == 0:
            break
        dim = rng.randrange(tensor.ndim)
        kind = rng.choice(["narrow", "chunk", "select", "transpose", "reshape"])
        if kind == "narrow":
            start = rng.randrange(tensor.shape[dim])
            tensor = tensor.narrow(dim, start, rng.randint(1, tensor.shape[dim] - start))
        elif kind == "chunk":
            tensor = rng.choice(tensor.chunk(rng.randint(1, tensor.shape[dim]), dim))
        elif kind == "select":
            tensor = tensor.select(dim, rng.randrange(tensor.shape[dim]))
        elif kind == "transpose" and tensor.ndim > 1:
            tensor, only_slices = tensor.transpose(0, dim), False
        elif kind == "reshape" and tensor.is_contiguous() and tensor.shape[dim] % 2 == 0:
            tensor, only_slices = tensor.unflatten(dim, (2, -1)), False
    return tensor, only_slices


def test_a_box_holds_every_element_of_a_view_and_no_more_of_slices():
    rng = random.Random(0)
    for _ in range(2000):
        shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
        source = torch.arange(torch.Size(shape).numel()).view(shape)
        view, only_slices = random_view(rng, source)
        box = box_of(view, source)
        inside = set(source[tuple(slice(a, b) for a, b in box)].flatten().tolist())
        read = set(view.flatten().tolist())
        assert read <= inside, (shape, view.shape, view.stride(), box)
        if only_slices:
            assert read == inside, (shape, view.shape, view.stride(), box)


class Worker(torch.nn.Module):
    """Loads as servers do: fused rows, columns, an embedding with padding, a scale, and a tensor that another rank has."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        shapes = {"qkv": (8, 6), "o": (6, 4), "embed": (6, 6), "scale": (), "norm": (6,)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.full(shape, -1.0)))

    def load_weights(self, weights):
        for name, value in weights:
            if name in "qkv":
                rows, at = {"q": (4, 0), "k": (2, 4), "v": (2, 6)}[name]
                self.qkv.data.narrow(0, at, rows).copy_(value.narrow(0, self.rank * rows, rows))
            elif name == "o":
                self.o.data.copy_(value.chunk(2, dim=1)[self.rank])
            elif name == "embed":
                mine = value[self.rank * 6 : self.rank * 6 + 6]
                self.embed.data[: len(mine)].copy_(mine)
                self.embed.data[len(mine) :].fill_(0)
            elif name == "scale":
                self.scale.data.fill_(value.item())
            elif name == "norm":
                self.norm.data.copy_(value + 1)
            elif self.rank == 0:
                raise KeyError(name)


ABOUT = {"q": [8, 6], "k": [4, 6], "v": [4, 6], "o": [6, 8], "embed": [10, 6], "scale": [], "norm": [6], "other": [3]}


def test_loaders_are_watched_and_nothing_is_loaded():
    about = {name: (torch.float32, shape) for name, shape in ABOUT.items()}
    model = Worker(1)
    before = {name: value.clone() for name, value in model.named_parameters()}
    boxes = read_by(model.load_weights, about)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert boxes == {
        "q": [(4, 8), (0, 6)], "k": [(2, 4), (0, 6)], "v": [(2, 4), (0, 6)], "o": [(0, 6), (4, 8)], "embed": [(6, 10), (0, 6)],
        "scale": [], "norm": [(0, 6)], "other": [(0, 0)],
    }  # fmt: skip
    with pytest.raises(cm.sync.SyncError, match="not known: KeyError"):
        read_by(Worker(0).load_weights, about)


def test_what_was_not_received_is_not_read():
    whole = {name: torch.randn(shape) for name, shape in ABOUT.items() if name != "other"}
    about = {name: (torch.float32, ABOUT[name]) for name in whole}
    expected, model = Worker(1), Worker(1)
    expected.load_weights(iter(whole.items()))
    boxes = read_by(model.load_weights, about)
    with Watched(boxes) as watched, torch.no_grad():
        filled = {}
        for name, value in whole.items():
            part = tuple(slice(a, b) for a, b in boxes[name])
            filled[name] = torch.full_like(value, float("nan"))
            filled[name][part] = value[part]
            watched.add(name, filled[name])
        model.load_weights(iter(filled.items()))
    for (name, one), (_, other) in zip(expected.named_parameters(), model.named_parameters()):
        assert torch.equal(one, other), name
    other_rank = Worker(0)
    with pytest.raises(cm.sync.SyncError, match="reads .* of `q`, of which only"), Watched(boxes) as watched, torch.no_grad():
        other_rank.load_weights((name, watched.add(name, value)) for name, value in filled.items())
    assert bool((other_rank.qkv == -1).all())
