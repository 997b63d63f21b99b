"""One local cluster for all tests of a process: its start takes seconds. Nodes can join it and be taken away."""

import os
import secrets
from collections.abc import Iterator

import pytest
from ray_stand_in import stand_in  # noqa: F401

from lit_async_rl.ray import runtime
from lit_async_rl.ray.security import CLUSTERS, use_token

HEALTH = dict(initial_delay_ms=1000, period_ms=500, timeout_ms=500, failure_threshold=10)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[object]:
    """A cluster of one node, which this process is connected to."""
    pytest.importorskip("ray")
    runtime.import_ray("the tests")
    from ray._private import ray_constants
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ[CLUSTERS] = "0"  # all nodes on loopback
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    use_token()
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ["PYTHONPATH"] = runtime.search_path()
    os.environ |= {f"RAY_health_check_{name}": str(value) for name, value in HEALTH.items()}
    head = dict(num_cpus=16, object_store_memory=200 << 20, include_dashboard=False)
    cluster = Cluster(initialize_head=True, head_node_args=head)
    runtime.connect(cluster.address, what="the tests")
    yield cluster
    import ray

    ray.shutdown()
    cluster.shutdown()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
