"""A token is sent to a cluster that asks for one, and to no other: Ray takes a caller that differs for dead."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lit_async_rl.errors import SetupError
from lit_async_rl.ray import security
from lit_async_rl.ray.security import AUTH_MODE, asks_for_token, follow

grpc = pytest.importorskip("grpc")


class Head(grpc.GenericRpcHandler):
    """Of a cluster: answers whoever calls, or refuses those without a token."""

    def __init__(self, asks):
        self.asks = asks

    def service(self, details):
        def answer(request, context):
            if self.asks and "authorization" not in dict(details.invocation_metadata):
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer) if details.method == security.ALIVE else None


@pytest.fixture
def head():
    """Starts a stand-in for a cluster's head; gives its address."""
    with ThreadPoolExecutor(2) as threads:
        servers = []

        def start(asks):
            server = grpc.server(threads, handlers=[Head(asks)])
            servers.append(server)
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            return f"127.0.0.1:{port}"

        yield start
        for server in servers:
            server.stop(None)


@pytest.fixture
def modes(monkeypatch):
    """What this process was set to."""
    found = []
    monkeypatch.setattr(security, "_set_here", [])
    monkeypatch.delenv(AUTH_MODE, raising=False)
    monkeypatch.setattr(security, "_set_mode", found.append)
    return found


@pytest.mark.parametrize("has_token", [False, True])
@pytest.mark.parametrize("asks", [False, True])
def test_a_process_does_as_the_cluster_does_whatever_token_lies_in_the_home_directory(
    head, modes, monkeypatch, asks, has_token
):
    monkeypatch.setattr(security, "has_token", lambda: has_token)
    follow(head(asks))
    assert modes == ["token" if asks else "disabled"]


def test_a_mode_that_is_set_and_differs_is_refused_with_what_to_set(head, modes, monkeypatch):
    monkeypatch.setenv(AUTH_MODE, "token")
    follow(head(True))
    address = head(False)
    with pytest.raises(
        SetupError,
        match=rf"has RAY_AUTH_MODE=token, but the Ray cluster at {address} requires no token: set RAY_AUTH_MODE=disab",
    ):
        follow(address)
    monkeypatch.setenv(AUTH_MODE, "disabled")
    with pytest.raises(
        SetupError, match=r"requires a token: set RAY_AUTH_MODE=token for this process, or start the cluster with"
    ):
        follow(head(True))
    assert modes == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("listens", ["nothing", "another server", "what never answers"])
def test_an_address_without_a_head_is_refused_before_ray_waits_for_it(listens, modes, monkeypatch):
    monkeypatch.setattr(security, "PROBE_S", 0.3)
    monkeypatch.setattr(security, "BUSY_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        web = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        ports = {"nothing": 1, "another server": web.server_port, "what never answers": silent.getsockname()[1]}
        address = f"127.0.0.1:{ports[listens]}"
        with pytest.raises(SetupError, match=f"no Ray head node answers at {address}: ") as error:
            follow(address)
        web.shutdown()
        web.server_close()
    assert "\n" not in str(error.value)
    assert modes == []


def test_without_a_cluster_on_this_machine_the_token_decides(modes, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert asks_for_token("auto") is None
    monkeypatch.setattr(security, "has_token", lambda: True)
    follow("auto")
    assert modes == ["token"]


def test_auto_is_the_cluster_that_was_started_last_on_this_machine(head, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(head(True))
    assert asks_for_token("auto") is True


def test_a_ray_that_is_started_here_asks_for_a_token_after_a_cluster_that_asked_for_none(head, monkeypatch):
    monkeypatch.setattr(security, "_set_here", [])
    monkeypatch.setenv(AUTH_MODE, "")  # restored afterwards
    monkeypatch.delenv(AUTH_MODE)
    follow(head(False))
    security.use_token()
    assert os.environ[AUTH_MODE] == "token"
    follow(head(False))
    assert os.environ[AUTH_MODE] == "disabled"
