"""What all tests that need vLLM have."""

from vllm_forks import vllm_starts_forks  # noqa: F401
