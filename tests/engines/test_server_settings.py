"""Settings of an engine on servers."""

import pytest

from lit_async_rl.engines.vllm.servers.engine import VLLMServerEngine


@pytest.mark.parametrize("servers", [[], ["a:1", "http://a:1"], ["a"], ["a:b"], ["ftp://a:1"], ["a:1/v1"]])
def test_servers_must_be_host_and_port(servers):
    with pytest.raises(ValueError, match=r"data\.engine\.servers"):
        VLLMServerEngine(servers)


def test_settings_out_of_range_are_named():
    with pytest.raises(ValueError, match=r"data\.engine\.health_timeout_s must be positive, got 0"):
        VLLMServerEngine(["a:1"], health_timeout_s=0.0)
