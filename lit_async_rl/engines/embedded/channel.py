"""Messages between the trainer's process and an engine's: JSON, with tensors beside it. Reading one runs no code."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from lit_async_rl.engines.requests import Completion, GenerationRequest, SamplingParams
from lit_async_rl.expert_choices import pack_choices, unpack_choices
from lit_async_rl.sampler_head import pack_heads, unpack_heads

Message = tuple[dict[str, Any], dict[str, Tensor]]
_SIZES = struct.Struct(">QQ")  # bytes of the JSON and of the tensors


class Channel:
    """One end of a connection; any thread may send, one receives.

    Args:
        end: connected stream socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._file = end, end.makefile("rb")
        self._sending = threading.Lock()

    def send(self, fields: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Sends a message.

        Raises:
            OSError: the other process has ended.
        """
        text = json.dumps(fields).encode()
        blob = save({name: tensor.contiguous() for name, tensor in tensors.items()}) if tensors else b""
        with self._sending:
            self._socket.sendall(_SIZES.pack(len(text), len(blob)) + text + blob)

    def receive(self) -> Message | None:
        """Waits for the next message; None after the other process has ended."""
        try:
            if len(sizes := self._file.read(_SIZES.size)) < _SIZES.size:
                return None
            num_text, num_blob = _SIZES.unpack(sizes)
            text, blob = self._file.read(num_text), self._file.read(num_blob)
        except OSError:  # it was killed
            return None
        if len(text) < num_text or len(blob) < num_blob:
            return None
        return json.loads(text), load(blob) if blob else {}

    def close(self) -> None:
        """Ends the connection; a thread that receives gets None."""
        with contextlib.suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def pack_requests(requests: Sequence[GenerationRequest]) -> list[dict[str, Any]]:
    """Requests as JSON, without the `prompt` that an engine of text does not use."""
    return [vars(request) | {"sampling": asdict(request.sampling), "prompt": None} for request in requests]


def unpack_requests(packed: Sequence[dict[str, Any]]) -> list[GenerationRequest]:
    """Requests that `pack_requests` has made JSON of."""
    return [
        GenerationRequest(**{**fields, "prompt_ids": tuple(fields["prompt_ids"]), "sampling": _sampling(fields)})
        for fields in packed
    ]


def _sampling(fields: dict[str, Any]) -> SamplingParams:
    sampling = fields["sampling"]
    names = ("stop_token_ids", "stop", "end_token_ids")
    tuples = {name: tuple(sampling[name]) for name in names if sampling[name] is not None}
    return SamplingParams(**{**sampling, **tuples})


def pack_completions(completions: Sequence[Completion]) -> tuple[list[list[Any]], dict[str, Tensor]]:
    """Completions of an engine without an environment, as JSON (numbers are exact) and tensors."""
    packed = [[c.request_id, c.sample_index, c.token_ids, c.logprobs, c.versions, c.finish_reason] for c in completions]
    return packed, pack_heads([c.head for c in completions]) | pack_choices([c.experts for c in completions])


def unpack_completions(packed: Sequence[list[Any]], tensors: dict[str, Tensor]) -> list[Completion]:
    """Completions that `pack_completions` has made JSON and tensors of."""
    heads, experts = unpack_heads(tensors, len(packed)), unpack_choices(tensors, len(packed))
    return [
        Completion(
            request_id=request_id,
            sample_index=sample_index,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            finish_reason=finish_reason,
            head=head,
            experts=choices,
        )
        for (request_id, sample_index, token_ids, logprobs, versions, finish_reason), head, choices in zip(
            packed, heads, experts, strict=True
        )
    ]
