"""Mapping between requests of the engine and the samples of groups, including resumed ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lit_async_rl.engines.base import Completion, GenerationRequest, SamplingParams
from lit_async_rl.expert_choices import ExpertChoices
from lit_async_rl.sampler_head import join_heads
from lit_async_rl.types import Prompt


@dataclass(frozen=True)
class _Part:
    """Sample that a request stands for, with its resumed tokens, if it is not sample n of group `id`."""

    index: int
    sample: int
    prefix: Completion | None = None


class SampleRequests:
    """Makes requests for missing samples and maps completions back to groups.

    Args:
        group_size: completions per prompt.
        sampling: sampling parameters.
        replicate_prompts: one request per completion.
    """

    def __init__(self, group_size: int, sampling: SamplingParams, replicate_prompts: bool) -> None:
        self.group_size, self.sampling, self.replicate_prompts = group_size, sampling, replicate_prompts
        self._parts: dict[int, list[_Part]] = {}

    def make(
        self,
        index: int,
        prompt: Prompt,
        prompt_ids: tuple[int, ...],
        lacking: Sequence[int],
        partials: Iterable[Completion],
    ) -> list[GenerationRequest]:
        """Requests for the samples `lacking` of group `index`; those in `partials` are resumed.

        Samples without tokens share one request whose id is the group's index. Others have a request each, with
        negative ids.
        """
        prefixes = {c.sample_index: c for c in partials if c.token_ids and c.finish_reason == "abort"}
        fresh = [n for n in lacking if n not in prefixes and not self.replicate_prompts]
        is_fresh = set(fresh)  # a group may have a hundred thousand samples
        requests = []
        self._parts.pop(index, None)
        if fresh:
            if len(fresh) < self.group_size:
                self._parts[index] = [_Part(index, n) for n in fresh]
            requests.append(
                GenerationRequest(
                    id=index,
                    prompt_ids=prompt_ids,
                    num_samples=len(fresh),
                    sampling=self.sampling,
                    prompt=prompt,
                    session=index,
                )
            )
        for n in lacking:
            if n in is_fresh:
                continue
            part = _Part(index, n, prefixes.get(n))
            known = () if part.prefix is None else part.prefix.token_ids
            rest = dataclasses.replace(self.sampling, max_tokens=self.sampling.max_tokens - len(known))
            request_id = -1 - (index * self.group_size + n)
            requests.append(
                GenerationRequest(
                    id=request_id,
                    prompt_ids=prompt_ids + known,
                    num_samples=1,
                    sampling=rest,
                    prompt=prompt,
                    num_resumed=len(known),
                    session=index,
                )
            )
            self._parts[request_id] = [part]
        return requests

    def index_of(self, request_id: int) -> int:
        """The group that a request is for."""
        parts = self._parts.get(request_id)
        return parts[0].index if parts else request_id

    def whole(self, completion: Completion) -> Completion:
        """A completion, finished or not, under its group's id and sample index, with its resumed tokens."""
        if completion.request_id not in self._parts:
            return completion
        part = self._parts[completion.request_id][completion.sample_index]
        named = dataclasses.replace(completion, request_id=part.index, sample_index=part.sample)
        if part.prefix is None:
            return named
        heads = [head for head in (part.prefix.head, completion.head) if head is not None]
        return dataclasses.replace(
            named,
            head=join_heads(heads) if len(heads) == 2 else None,
            experts=_continued(part.prefix, completion),
            token_ids=part.prefix.token_ids + completion.token_ids,
            logprobs=part.prefix.logprobs + completion.logprobs,
            versions=part.prefix.versions + completion.versions,
        )

    def forget(self, request_ids: Iterable[int]) -> None:
        """Removes these request ids; later completions for them are dropped."""
        for request_id in request_ids:
            self._parts.pop(request_id, None)


def _continued(prefix: Completion, rest: Completion) -> ExpertChoices | None:
    """Experts of a resumed completion: of each token when the next one was sampled."""
    if prefix.experts is None or rest.experts is None:
        return None
    return prefix.experts.continued(rest.experts)
