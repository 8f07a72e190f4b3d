"""Classes of TRL's that talk to a weight transfer, run as they are without the modules around them, which import transformers, accelerate and more."""

import __future__
import ast
import json
import logging
import os
import pathlib
import sys
import time
import types
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

# By file: whole classes and functions, and of a class only these methods.
PARTS = {
    "async_grpo_trainer.py": {
        "WeightTransferProtocol": None,
        "_TrainBeginCallback": None,
        "_iter_vllm_named_params": None,
        "AsyncGRPOTrainer": ("_streaming_iter", "_sync_weight", "_sync_weight_merged"),
    },
    "vllm_client.py": {"VLLMClient": None},
}


def folder():
    """Where TRL is installed, or unpacked; None where it is not."""
    places = [os.environ.get("CROSSMESH_FRAMEWORKS", ""), *sys.path]
    found = [pathlib.Path(place) / "trl/experimental/async_grpo" for place in places if place]
    return next((place for place in found if (place / "vllm_client.py").exists()), None)


def parts():
    """The classes and functions, by name."""
    known = dict(torch=torch, time=time, DTensor=DTensor, Iterator=Iterator, Protocol=Protocol, TrainerCallback=object, requests=Requests)
    known |= dict(logger=logging.getLogger("trl"), is_peft_model=lambda model: False, is_requests_available=lambda: True)
    for name, wanted in PARTS.items():
        tree = ast.parse((folder() / name).read_text())
        found = [node for node in tree.body if getattr(node, "name", None) in wanted]
        assert {node.name for node in found} == set(wanted), name
        for node in found:
            methods = wanted[node.name]
            if methods:
                node.bases, node.body = [], [part for part in node.body if getattr(part, "name", None) in methods]
                assert len(node.body) == len(methods), node.name
        code = compile(ast.Module(found, []), name, "exec", flags=__future__.annotations.compiler_flag)
        exec(code, known)
    return types.SimpleNamespace(**known)


class Requests:
    """As much of the library of this name as TRL's client uses, on the standard library."""

    ConnectionError = Timeout = OSError

    @staticmethod
    def get(url, timeout=None, **given):
        return Requests._ask("GET", url, timeout, **given)

    @staticmethod
    def post(url, timeout=None, **given):
        return Requests._ask("POST", url, timeout, **given)

    @staticmethod
    def _ask(method, url, timeout, params=None, **body):
        url = f"{url}?{urllib.parse.urlencode(params)}" if params else url
        data = json.dumps(body["json"]).encode() if "json" in body else None
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=timeout) as said:
            text = said.read().decode()
            return types.SimpleNamespace(status_code=said.status, text=text, json=lambda: json.loads(text))
